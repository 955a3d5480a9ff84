"""Parse the steps of a load: `8`, `1,8,32`, `1:64:*2` or `50:300:50`."""

from penstock.core.errors import InvalidRequest

MAX_STEPS = 100


def parse_steps(text: str, name: str) -> list[float]:
    """Parse steps of load, in the given order. A ramp is first:last:+step or first:last:*factor."""
    found: list[float] = []
    for part in text.split(","):
        found += _parse_ramp(part.strip(), name) if ":" in part else [_parse_number(part.strip(), name)]
        if len(found) > MAX_STEPS:
            raise InvalidRequest(f"--{name} {text}: more than {MAX_STEPS} steps; use a larger step")
    return found


def parse_counts(text: str, name: str) -> list[int]:
    found = parse_steps(text, name)
    if any(step != int(step) for step in found):
        raise InvalidRequest(f"--{name} {text}: expected whole numbers")
    return [int(step) for step in found]


def _parse_ramp(text: str, name: str) -> list[float]:
    parts = text.split(":")
    if len(parts) != 3 or not parts[2]:
        raise InvalidRequest(f"--{name} {text}: expected a ramp first:last:+step or first:last:*factor")
    first, last = _parse_number(parts[0], name), _parse_number(parts[1], name)
    is_factor = parts[2].startswith("*")
    step = _parse_number(parts[2].lstrip("*+"), name)
    if (is_factor and step <= 1) or last < first:
        raise InvalidRequest(f"--{name} {text}: a ramp must rise: use a last number above the first, a factor above 1")
    found = [first]
    while len(found) <= MAX_STEPS:
        following = found[-1] * step if is_factor else found[-1] + step
        if following > last * (1 + 1e-9):
            break
        found.append(following)
    return found


def _parse_number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise InvalidRequest(f"--{name}: expected a number above 0, got '{text}'")
    return value
