import hashlib

from ratchet.adapters.calls import CallId


def test_a_seed_is_31_bits_of_a_hash_of_run_rollout_role_and_call() -> None:
    digest = hashlib.sha256(b"7/train-00000-0000-00/policy/2").digest()
    seed = CallId("train-00000-0000-00", 0, "policy", 2).seed(7)
    assert seed == int.from_bytes(digest[:4]) // 2 < 2**31


def test_seeds_and_ids_depend_on_the_call_and_not_on_the_attempt() -> None:
    first, again = CallId("r", 0, "policy", 0), CallId("r", 1, "policy", 0)
    assert (first.seed(7), first.name("answer")) == (again.seed(7), again.name("answer"))
    others = [CallId("r", 0, "policy", 1), CallId("r", 0, "judge", 0), CallId("s", 0, "policy", 0)]
    assert len({place.seed(7) for place in (first, *others)} | {first.seed(8)}) == 5


def test_a_held_out_rollout_has_the_same_seeds_whichever_checkpoint_plays_it() -> None:
    names = ("test-00000-0003-01", "test-00010-0003-01", "test.4ab12f-00002-0003-01")
    calls = [CallId(name, 0, "policy", 0) for name in names]
    assert len({call.seed(7) for call in calls}) == 1
    assert len({call.name("answer") for call in calls}) == 3
    others = ("test-00000-0004-01", "greedy-00000-0003-01", "train-00000-0003-01")
    trained = ("train-00000-0000-00", "train-00001-0000-00")
    assert len({CallId(name, 0, "policy", 0).seed(7) for name in (*others, names[0])}) == 4
    assert len({CallId(name, 0, "policy", 0).seed(7) for name in trained}) == 2
