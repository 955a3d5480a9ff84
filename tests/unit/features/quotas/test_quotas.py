"""The charges of requests against the server's quotas: whom they count for, and what a refusal says."""

from penstock.core.config import QuotaSettings
from penstock.core.principals import Principal
from penstock.core.requests import Controls, InferRequest, PacketFields, SessionStep
from penstock.features.quotas.quotas import QuotaCharges, get_session_id, make_quota_error, make_refund
from penstock.storage.limits.limit_store import ChargeResult

SEED = QuotaSettings(
    requests_per_second_total=100,
    requests_per_second_per_session=10,
    requests_per_second_per_block_id=10,
    requests_per_session_id=1000,
    requests_per_block_id=100,
)


def request(session_id: str = "", key_id: str = "") -> InferRequest:
    controls = Controls(session=SessionStep(session_id) if session_id else None)
    return InferRequest("m", [], controls=controls, principal=Principal("p", key_id))


def test_a_request_is_charged_to_the_server_its_session_and_its_block() -> None:
    charges = QuotaCharges(SEED).of(request("s"), "blk-a")
    assert [charge.key for charge in charges] == ["quota", "quota:session:s", "quota:block:blk-a"]
    assert [spend.rate.name for charge in charges for spend in charge.spends] == [
        "requests_per_second_total",
        "requests_per_second_per_session",
        "requests_per_session_id",
        "requests_per_second_per_block_id",
        "requests_per_block_id",
    ]
    assert [charge.key for charge in QuotaCharges(SEED).of(request(), "blk-a")] == ["quota", "quota:block:blk-a"]
    assert QuotaCharges(QuotaSettings()).is_empty
    only = QuotaCharges(QuotaSettings(requests_per_session_id=1))
    assert (only.is_empty, only.of(request(), "blk-a")) == (False, [])


def test_the_session_of_a_packet_counts_and_keys_have_sessions_of_their_own() -> None:
    packet = request("of-the-parameters", "key-1")
    packet.packet = PacketFields("of-the-packet")
    assert get_session_id(packet) == "key-1:of-the-packet"
    assert get_session_id(request("s", "key-1")) != get_session_id(request("s", "key-2"))


def test_a_refusal_names_the_quota_and_when_to_come_back() -> None:
    _, session, block = QuotaCharges(SEED).of(request("s"), "blk-a")
    error = make_quota_error(session, ChargeResult((0.5, 86_400.0), "requests_per_session_id", 3600.0))
    assert str(error) == (
        "the quota of this session is used up (requests_per_session_id, 1000 in 86400 s): try again in 3.6e+03 s"
    )
    assert (error.fields["limit"], error.retry_after_s) == ("requests_per_session_id", 3600.0)
    second, total = error.limit_statuses
    assert (second.name, second.quota, second.remaining, second.window_s) == (
        "requests_per_second_per_session", 10, 5, 1,
    )  # fmt: skip
    assert (total.quota, total.remaining, total.window_s, total.reset_s) == (1000, 0, 86_400, 3600.0)
    error = make_quota_error(block, ChargeResult((1.0, 0.0), "requests_per_second_per_block_id", 0.05))
    assert "this block is used up (requests_per_second_per_block_id, 10 per second)" in str(error)


def test_a_charge_taken_back_undoes_all_its_spends() -> None:
    charge = QuotaCharges(SEED).of(request("s"), "blk-a")[1]
    back = make_refund(charge)
    assert back.is_owed
    assert [spend.cost for spend in back.spends] == [-1, -1]
