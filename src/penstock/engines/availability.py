"""What this machine and this installation can run, asked of the runtimes themselves."""


def why_not(engine: str, device: str, precision: str) -> str | None:
    """Why a combination cannot run here; None where it can."""
    if engine == "openvino":
        return _why_not_openvino(device, precision)
    if engine == "onnx":
        return _why_not_onnx(device)
    return f"Penstock has no {engine} engine"


def _why_not_onnx(device: str) -> str | None:
    import onnxruntime

    from penstock.engines.onnx import PROVIDERS

    provider = PROVIDERS[device]
    if provider not in onnxruntime.get_available_providers():
        return f"the installed ONNX Runtime has no {provider}"
    return None


def _why_not_openvino(device: str, precision: str) -> str | None:
    if device != "cpu":
        return f"the openvino engine runs on the CPU, not on {device}"
    if precision == "bf16":
        import openvino

        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            return "the processor has neither AVX-512 BF16 nor AMX"
    return None
