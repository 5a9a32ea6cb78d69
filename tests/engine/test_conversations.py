"""The conversation latch: what fires in one turn acts in every later one, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reference.models import pack, random_direction
from reference.sources import Site
from reference.wire import ALWAYS, ALWAYS_IN_ANSWER, Json, add, gate, probe, static
from steergate_server.runtime.conversations import forget_message, settle_message
from steergate_server.runtime.plan import decode_plan
from support.engines import Answer, SteeredEngine

from .oracle import Case, Oracle, differ, prompt
from .programs import between, observe, rows_at

HIDDEN = 64
PROBE = rows_at(70, [Site(1, "post_block")], 1.0)
ADD = {"kind": "add", "steer": {"kind": "name", "name": "last"}, "strength": 0.7}
ADD_EARLY = {"kind": "add", "steer": {"kind": "name", "name": "two-hooks"}, "strength": -0.5}
ATTENUATE = {"kind": "attenuate", "keep": 0.25}
BESIDE = [static(rows_at(50, [Site(0, "post_block"), Site(3, "pre_attn")], 6.0))]
PLAIN = {"report": "summary"}


def lasting(when: Json, apply: Json) -> Json:
    """A gate of scope rest_of_conversation."""
    return gate(when, "rest_of_conversation", apply)


def probing(threshold: float, **more: Any) -> Json:
    """A probe, which fires above a threshold."""
    return probe(PROBE, threshold, **more)


FIRES, NEVER = probing(-1e4, at="answer"), probing(1e4, at="answer")

_numbers = itertools.count()


@pytest.fixture
def conversation() -> str:
    """A conversation of this test's own."""
    return f"conversation-{next(_numbers)}"


def turn(engine: SteeredEngine, text: list[int], request: Any, name: str | None, tokens: int = 6) -> Answer:
    """One turn by itself, from a cold prefix cache."""
    engine.llm.reset_prefix_cache()
    (answer,) = engine.steer([text], [request], tokens, [name])
    return answer


def is_plain(engine: SteeredEngine, text: list[int], answer: Answer) -> bool:
    """Whether an answer is the one that no steering gives, to the bit."""
    plain = turn(engine, text, None, None, len(answer.tokens))
    return (plain.tokens, plain.logprobs) == (answer.tokens, answer.logprobs)


# Against the reference ----------------------------------------------------------------------------------------------


def first_turns(oracle: Oracle) -> Iterator[Case]:
    """A first turn for every kind of gate; probes lie among the scores that they meet, or off their reach."""
    rng = np.random.default_rng(8)
    applies = itertools.cycle([(ADD, []), (ATTENUATE, BESIDE), (ADD_EARLY, BESIDE)])
    for when in (ALWAYS, ALWAYS_IN_ANSWER):
        for apply, vectors in itertools.islice(applies, 3):
            yield Case(prompt(300, 9), {"gates": [lasting(when, apply)], "vectors": vectors, "report": "summary"}, 8)
    for number, (fires, score, at) in enumerate(
        itertools.product(("above", "below"), ("dot", "cosine"), ("generated", "prompt_end", "answer"))
    ):
        text = prompt(310 + number, (3, 32, 45)[number % 3])
        when = probe(PROBE, 0.0, fires=fires, score=score, at=at)
        ((*scores,),) = observe(oracle, text, [when], 8)
        for threshold in {between(scores, rng), 1e4 if fires == "above" else -1e4}:
            apply, vectors = next(applies)
            gates = [lasting({**when, "threshold": threshold}, apply)]
            yield Case(text, {"gates": gates, "vectors": vectors, "report": "summary"}, 8)


OTHER = gate(ALWAYS, "this_token", add(random_direction(77, HIDDEN, [2], norm=5.0)))


def later_request(number: int, first: Any) -> Any:
    """What the later turn of a conversation asks for: nothing, the same again, other gates, static steering."""
    return (
        PLAIN,
        first,
        {"gates": [OTHER], "report": "summary"},
        {"gates": [OTHER, *first["gates"]], "vectors": BESIDE, "report": "summary"},
    )[number % 4]


def test_later_turns_are_bridged(engine: SteeredEngine, oracle: Oracle) -> None:
    opening = list(first_turns(oracle))
    names = [f"{id(engine)}-matrix-{number}" for number in range(len(opening))]
    engine.llm.reset_prefix_cache()
    answers = engine.steer(
        [case.prompt for case in opening], [case.request for case in opening], [8] * len(opening), names
    )
    later = []
    for number, (case, answer) in enumerate(zip(opening, answers, strict=True)):
        oracle.check(case, answer)
        (trace,) = oracle.along(case, answer.tokens).gates
        bridged = case.request["gates"] if trace.latched else []
        text = [*case.prompt, *answer.tokens, *prompt(400 + number, 5)]
        later.append(Case(text, later_request(number, case.request), 7, {"bridged": bridged}))
    latched = [bool(case.around["bridged"]) for case in later]
    assert 10 < sum(latched) < len(latched) - 5, "some latch, some do not"

    second = engine.steer([c.prompt for c in later], [c.request for c in later], [7] * len(later), names)

    for case, answer in zip(later, second, strict=True):
        oracle.check(case, answer)
    fresh = [f"{name}-fresh" for name in names]
    unbridged = engine.steer([c.prompt for c in later], [c.request for c in later], [7] * len(later), fresh)
    effective = [differ(*pair) for pair, on in zip(zip(second, unbridged, strict=True), latched, strict=True) if on]
    assert sum(effective) > 0.6 * len(effective)


def test_a_set_of_gates_acts_together_and_declared_again_acts_once(
    engine: SteeredEngine, oracle: Oracle, conversation: str
) -> None:
    gates = [lasting(FIRES, ADD), lasting(ALWAYS, ADD_EARLY), lasting(FIRES, ATTENUATE)]
    text = prompt(500, 12)
    for number, declared in enumerate([[0], [0, 1], [1, 2, 0], []]):
        request = {"gates": [gates[at] for at in declared], "vectors": BESIDE, "report": "summary"}
        bridged = [gates[at] for at in sorted({at for past in [[0], [0, 1], [1, 2, 0]][:number] for at in past})]
        case = Case(text, request, 6, {"bridged": bridged})
        answer = turn(engine, text, request, conversation)
        oracle.check(case, answer)
        assert len(answer.ours.get("bridge", [])) == len(bridged)
        text = [*text, *answer.tokens, *prompt(510 + number, 3)]


def test_bridged_gates_take_no_lanes(engine: SteeredEngine, oracle: Oracle, conversation: str) -> None:
    """A fifth gate would be one too many; four beside a bridge are not."""
    turn(engine, prompt(520, 5), [lasting(ALWAYS, ADD)], conversation)
    others = [
        gate(ALWAYS, "this_token", add(random_direction(80 + number, HIDDEN, [number], norm=3.0)))
        for number in range(4)
    ]
    check = Case(prompt(521, 9), {"gates": others, "report": "summary"}, 6, {"bridged": [lasting(ALWAYS, ADD)]})

    oracle.check(check, turn(engine, check.prompt, check.request, conversation))


# What latches, and when ---------------------------------------------------------------------------------------------


def test_a_gate_that_never_fires_does_not_latch(eager: SteeredEngine, conversation: str) -> None:
    turn(eager, prompt(530, 5), [lasting(NEVER, ADD)], conversation)

    assert is_plain(eager, prompt(531, 8), turn(eager, prompt(531, 8), None, conversation))


def test_conversations_are_apart(eager: SteeredEngine, conversation: str) -> None:
    turn(eager, prompt(530, 5), [lasting(ALWAYS, ADD)], conversation)

    other = turn(eager, prompt(531, 8), None, f"{conversation}-other")
    assert is_plain(eager, prompt(531, 8), other)
    assert not is_plain(eager, prompt(531, 8), turn(eager, prompt(531, 8), None, conversation))


def test_a_firing_at_the_last_token_counts_and_one_behind_it_does_not(eager: SteeredEngine, conversation: str) -> None:
    """With one answer token only the prompt end is a row of the turn."""
    text = prompt(532, 6)
    for at, plain in (("generated", True), ("prompt_end", False)):
        name = f"{conversation}-{at}"
        turn(eager, text, [lasting(probing(-1e4, at=at), ADD)], name, tokens=1)
        assert is_plain(eager, text, turn(eager, text, None, name)) is plain


def test_always_latches_with_the_first_answer_row(eager: SteeredEngine, conversation: str) -> None:
    turn(eager, prompt(533, 6), [lasting(ALWAYS, ADD)], conversation, tokens=1)

    assert not is_plain(eager, prompt(534, 6), turn(eager, prompt(534, 6), None, conversation))


def test_no_steering_keeps_the_latch(eager: SteeredEngine, oracle: Oracle, conversation: str) -> None:
    turn(eager, prompt(535, 6), [lasting(ALWAYS, ADD)], conversation)
    text = prompt(536, 8)

    assert is_plain(eager, text, turn(eager, text, False, conversation))
    oracle.check(Case(text, PLAIN, 6, {"bridged": [lasting(ALWAYS, ADD)]}), turn(eager, text, PLAIN, conversation))


def test_a_name_that_moves_or_goes_changes_no_latch(eager: SteeredEngine, oracle: Oracle, conversation: str) -> None:
    before, after = random_direction(95, HIDDEN, [3], norm=8.0), random_direction(96, HIDDEN, [2], norm=8.0)
    named = {"kind": "add", "steer": {"kind": "name", "name": "moving"}, "strength": 1.0}
    inlined = lasting(ALWAYS, {**named, "steer": {"kind": "inline", "packed": before}})
    eager.register("moving", "steer", before)
    turn(eager, prompt(537, 6), [lasting(ALWAYS, named)], conversation)
    case = Case(prompt(538, 8), PLAIN, 6, {"bridged": [inlined]})

    eager.register("moving", "steer", after, replace=True)
    oracle.check(case, turn(eager, case.prompt, PLAIN, conversation))
    # The same words mean another vector now: another gate, which joins the first.
    again = Case(case.prompt, {"gates": [lasting(ALWAYS, named)], "report": "summary"}, 6, case.around)
    oracle.registered["steer"]["moving"] = {"packed": after}
    oracle.check(again, turn(eager, case.prompt, again.request, conversation))
    eager.names.unregister("moving", "steer")
    answer = turn(eager, case.prompt, PLAIN, conversation)
    assert len(answer.ours["bridge"]) == 2
    moved = lasting(ALWAYS, {**named, "steer": {"kind": "inline", "packed": after}})
    oracle.check(Case(case.prompt, PLAIN, 6, {"bridged": [inlined, moved]}), answer)


def test_forgetting(eager: SteeredEngine, conversation: str) -> None:
    turn(eager, prompt(539, 6), [lasting(ALWAYS, ADD)], conversation)
    pinned = list((eager.spool / "pinned").iterdir())
    eager.tell(forget_message(conversation))

    assert is_plain(eager, prompt(540, 6), turn(eager, prompt(540, 6), None, conversation))
    assert pinned
    eager.tell(forget_message(conversation))  # once more does no harm


def test_what_runs_while_its_conversation_is_forgotten_latches_no_more(eager: SteeredEngine, conversation: str) -> None:
    """The gate fires at every row, before the message and after it."""
    llm = eager.llm
    llm.enqueue(
        [{"prompt_token_ids": prompt(541, 6)}],
        [parameters_of(eager, [lasting(FIRES, ADD)], conversation, 40)],
        use_tqdm=False,
    )
    for _ in range(10):
        llm.llm_engine.step()
    eager.tell(forget_message(conversation))
    llm.wait_for_completion(use_tqdm=False)
    eager.release()

    assert is_plain(eager, prompt(542, 6), turn(eager, prompt(542, 6), None, conversation))


def test_an_abort_keeps_what_was_latched(eager: SteeredEngine, conversation: str) -> None:
    llm = eager.llm
    (name,) = llm.enqueue(
        [{"prompt_token_ids": prompt(543, 6)}],
        [parameters_of(eager, [lasting(FIRES, ADD)], conversation, 400)],
        use_tqdm=False,
    )
    for _ in range(10):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([name])
    llm.wait_for_completion(use_tqdm=False)
    eager.release()

    assert not is_plain(eager, prompt(544, 6), turn(eager, prompt(544, 6), None, conversation))


@pytest.mark.parametrize(("last_row", "plain"), [(8, True), (9, False)])
def test_a_stop_string_decides_which_firings_count(
    eager: SteeredEngine, oracle: Oracle, conversation: str, last_row: int, plain: bool
) -> None:
    """The API server finds stop strings; it tells the last row whose output it gave. The gate first fires at row 9."""
    text = prompt(545, 6)
    when = probing(0.0, at="generated")
    ((*scores,),) = observe(oracle, text, [when], 12)
    when |= {"threshold": sorted(scores[:3])[-1], "fires": "above"}
    first = next(row for row, score in enumerate(scores) if score > when["threshold"] + 1e-3)
    name = f"{conversation}-{last_row}"
    plan = eager.plan([lasting({**when, "threshold": when["threshold"] + 1e-3}, ADD)], name, settlement=name)
    eager.llm.reset_prefix_cache()
    eager.run([text], [plan], 12)
    eager.release()

    assert is_plain(eager, text, turn(eager, text, None, name)), "not before it is settled"
    eager.tell(settle_message(name, len(text) + first + last_row - 9))
    assert is_plain(eager, text, turn(eager, text, None, name)) is plain


LOUD = pack("post_block", dict.fromkeys(range(4), np.full(HIDDEN, 1e38)))
"""A row that it is added to leaves the range of what is let through."""


@pytest.mark.parametrize("fault", ["not installed", "out of range"])
@pytest.mark.parametrize("when", [ALWAYS_IN_ANSWER, probing(-1e4, at="prompt_end")], ids=["always", "prompt-end"])
def test_a_turn_that_failed_latches_nothing(eager: SteeredEngine, conversation: str, fault: str, when: Json) -> None:
    """The engine has a token of it, which nobody is given: that is no accepted row."""
    rows = LOUD if fault == "out of range" else random_direction(97, HIDDEN, [1], norm=3.0)
    request = {"vectors": [static(rows, {"answer": "all"})], "gates": [lasting(when, ADD)]}
    name, text = f"{conversation}-{fault}", prompt(546, 6)
    plan = eager.plan(request, name)
    assert plan
    file = eager.spool / f"{decode_plan(plan).vectors[0].digest}.safetensors"
    content = file.read_bytes()
    if fault == "not installed":
        file.unlink()
    eager.llm.reset_prefix_cache()
    (answer,) = eager.run([text], [plan], 6)
    file.write_bytes(content)
    eager.release()

    assert (answer.finish_reason, answer.ours["error"]["code"]) == ("error", "algorithm_failed")
    assert is_plain(eager, text, turn(eager, text, None, name))


def parameters_of(engine: SteeredEngine, request: Any, name: str, tokens: int) -> Any:
    """Sampling parameters of a turn."""
    from support.engines import parameters

    return parameters(engine.plan(request, name), tokens)


# Nothing is left ----------------------------------------------------------------------------------------------------


def test_bridged_blocks_are_not_shared_with_plain_ones(eager: SteeredEngine, oracle: Oracle, conversation: str) -> None:
    """Warm equals cold: a bridged answer leaves nothing to a plain one, nor the other way round."""
    turn(eager, prompt(550, 6), [lasting(ALWAYS, ADD)], conversation)
    text = prompt(551, 70)
    bridged = Case(text, PLAIN, 40, {"bridged": [lasting(ALWAYS, ADD)]})
    for order in (("bridged", "plain"), ("plain", "bridged")):
        eager.llm.reset_prefix_cache()
        answers = {}
        for kind in order:
            name = conversation if kind == "bridged" else None
            (answers[kind],) = eager.steer([text], [PLAIN], 40, [name])
        oracle.check(bridged, answers["bridged"])
        warm = [*text, *answers["plain"].tokens]
        again = eager.steer([warm], [None], 5)[0]
        assert again.cached_tokens > 70
        cold = turn(eager, warm, None, None, 5)
        np.testing.assert_allclose(again.logprobs, cold.logprobs, rtol=0, atol=1e-4)
        shared = eager.steer([text], [PLAIN], 5, [conversation])[0]
        assert shared.cached_tokens == 64, "blocks before the prompt end are shared"


def test_nothing_is_left_on_the_worker(engine: SteeredEngine) -> None:
    turn(engine, prompt(552, 5), None, None)
    status = engine.status()

    assert {name: status[name] for name in ("live", "slots_used", "lanes_nonzero", "payloads_held", "pool_used")} == {
        "live": 0, "slots_used": 0, "lanes_nonzero": 0, "payloads_held": 0, "pool_used": status["pool_used"],
    }  # fmt: skip
