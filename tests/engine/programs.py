"""Requests with gates: the whole matrix of when x scope x apply x at, and random programs of several gates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from reference.models import random_direction
from reference.sources import Site
from reference.wire import ALWAYS, ALWAYS_IN_ANSWER, EVERYWHERE, OBSERVE, Json, add, gate, probe, static

from .oracle import Case, Oracle, prompt

HIDDEN = 64
SCOPES = ("this_token", "next_step", "rest_of_request")
"""All but `rest_of_conversation`, which has tests of its own."""

SCORES = ("dot", "cosine")
PROBE_AT = ("generated", "prompt_end", "answer")
SITES = [Site(layer, hook) for layer in range(4) for hook in ("pre_attn", "post_block")]
"""All sites, in execution order."""


def rows_at(seed: int, sites: Sequence[Site], norm: float) -> Json:
    """A packed vector with a random row of length `norm` at every one of some sites."""
    packed: Json = {}
    for hook in dict.fromkeys(site.hook for site in sites):
        packed |= random_direction(seed, HIDDEN, [site.layer for site in sites if site.hook == hook], hook, norm)
    return packed


def observe(oracle: Oracle, prompt_ids: list[int], whens: Sequence[Json], tokens: int) -> list[list[float]]:
    """The scores that probes meet in an unsteered answer: for each, those of the rows at which it looks."""
    gates = [gate({**when, "threshold": 0.0}, "this_token", OBSERVE) for when in whens]
    return [trace.scores for trace in oracle.free(Case(prompt_ids, gates, tokens)).gates]


def between(scores: Sequence[float], rng: np.random.Generator) -> float:
    """A threshold that some of these scores pass and some do not, far from all of them."""
    ordered = np.unique(np.round(scores, 2))  # equal tokens give equal scores at the embedding
    if len(ordered) < 2:
        score = float(ordered[0]) if len(ordered) else 0.0
        away = abs(score) * 0.3 + 0.05
        return score + float(rng.choice([-away, away]))
    # The widest gap of the middle half.
    low, high = len(ordered) // 4, max(len(ordered) // 4 + 1, 3 * len(ordered) // 4)
    at = low + int(np.argmax(np.diff(ordered[low : high + 1])))
    return float(ordered[at] + ordered[at + 1]) / 2


# The matrix ---------------------------------------------------------------------------------------------------------

MATRIX_LENGTHS = (1, 2, 7, 31, 32, 33, 70)
MATRIX_PROBES = (Site(1, "post_block"), Site(2, "pre_attn"), Site(2, "post_block"))
BESIDE = [
    static(rows_at(50, [Site(0, "post_block"), Site(2, "post_block")], 6.0)),
    static(rows_at(51, [Site(3, "pre_attn"), Site(3, "post_block")], 6.0), {"answer": "all"}, scale=0.8),
]
"""Static steering before and after every probe."""


def _applies(scope: str, probe_site: Site | None, seed: int) -> Iterator[tuple[Json, list[Json]]]:
    """Everything that a gate may apply under a scope, each with the static steering beside it."""
    places = {"later": [Site(3, "pre_attn"), Site(3, "post_block")]}
    if probe_site is not None:
        places["same"] = [probe_site]
    if probe_site is None or scope != "this_token":
        places["earlier"] = [Site(0, "pre_attn")]
    for number, sites in enumerate(places.values()):
        strength = (1.0, -0.7, 0.4)[seed % 3]
        yield add(rows_at(60 + number, sites, 9.0), strength), BESIDE if (seed + number) % 2 else []
    yield {"kind": "attenuate", "keep": (0.0, 0.3, 1.0 - 2**-3)[seed % 3]}, BESIDE
    if scope == "this_token":
        yield OBSERVE, BESIDE if seed % 2 else []


def matrix(oracle: Oracle, tokens: int = 10) -> list[Case]:
    """One request for every when x scope x apply x at, probe and vector at the same site and at different ones."""
    rng = np.random.default_rng(1)
    cases: list[Case] = []

    looks = list(itertools.product(MATRIX_PROBES, SCORES, PROBE_AT))
    whens = [probe(rows_at(70, [site], 1.0), 0.0, score=score, at=at) for site, score, at in looks]
    met = {
        (length, *key): scores
        for length in MATRIX_LENGTHS
        for key, scores in zip(looks, observe(oracle, prompt(100 + length, length), whens, tokens), strict=True)
    }

    def put(when: Json, scope: str, apply: Json, vectors: list[Json], length: int) -> None:
        request = {"gates": [gate(when, scope, apply)], "vectors": vectors, "report": "scores"}
        cases.append(Case(prompt(100 + length, length), request, tokens))

    for number, (scope, when) in enumerate(itertools.product(SCOPES, (ALWAYS, ALWAYS_IN_ANSWER))):
        for apply, vectors in _applies(scope, None, number):
            put(when, scope, apply, vectors, MATRIX_LENGTHS[len(cases) % len(MATRIX_LENGTHS)])
    kinds = itertools.product(SCOPES, ("above", "below"), SCORES, PROBE_AT)
    for number, (scope, fires, score, at) in enumerate(kinds):
        site = MATRIX_PROBES[number % len(MATRIX_PROBES)]
        for apply, vectors in _applies(scope, site, number):
            length = MATRIX_LENGTHS[len(cases) % len(MATRIX_LENGTHS)]
            threshold = between(met[length, site, score, at], rng)
            sharpness = 1.3 if score == "dot" else 12.0
            when = probe(rows_at(70, [site], 1.0), threshold, sharpness=sharpness, fires=fires, score=score, at=at)
            put(when, scope, apply, vectors, length)
    return cases


# Random programs ----------------------------------------------------------------------------------------------------


def random_programs(oracle: Oracle, count: int) -> list[Case]:
    """Requests of 1 to 4 gates at random sites beside up to two static vectors.

    Their thresholds lie among the scores that their probes meet in the unsteered answer. Five share a prompt.
    """
    cases: list[Case] = []
    for group in range(0, count, 5):
        rng = np.random.default_rng(1000 + group)
        prompt_ids = prompt(2000 + group, 1 + 199 * group // (count - 5))
        requests = [_random_request(rng, seed) for seed in range(group, group + 5)]
        probing = [one["when"] for request in requests for one in request["gates"] if one["when"]["kind"] == "probe"]
        for when, met in zip(probing, observe(oracle, prompt_ids, probing, 12), strict=True):
            when["threshold"] = between(met, rng)
        cases += [Case(prompt_ids, request, int(rng.integers(8, 17))) for request in requests]
    return cases


def _random_request(rng: np.random.Generator, seed: int) -> Json:
    vectors = _random_vectors(rng, seed)
    gates = [_random_gate(rng, 100 * seed + number, bool(vectors)) for number in range(rng.integers(1, 5))]
    return {"gates": gates, "vectors": vectors, "report": "scores"}


def _random_vectors(rng: np.random.Generator, seed: int) -> list[Json]:
    count = int(rng.integers(0, 3))
    where = ({"answer": "all"}, EVERYWHERE)[int(rng.integers(2))]
    # The first one is within reach of every gate.
    sites = [[SITES[int(rng.integers(7))], SITES[-1]], [SITES[int(rng.integers(8))]]]
    clauses = [where, ({"prompt": "all"}, {"generation": "all"})[int(rng.integers(2))]]
    return [
        static(
            rows_at(3000 + 10 * seed + number, sites[number], 5.0), clauses[number], scale=float(rng.choice([1, -0.6]))
        )
        for number in range(count)
    ]


def _random_gate(rng: np.random.Generator, seed: int, steered: bool) -> Json:
    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    scope, at_probe = pick(*SCOPES), int(rng.integers(8))
    when: Json = pick(ALWAYS, ALWAYS_IN_ANSWER)
    first = 0
    if rng.random() < 0.85:
        score = pick("dot", "cosine")
        when = probe(
            rows_at(4000 + seed, [SITES[at_probe]], 1.0),
            0.0,
            score=score,
            fires=pick("above", "below"),
            at=pick("generated", "generated", "prompt_end", "answer", "answer"),
            sharpness=float(rng.uniform(0.3, 3.0) * (1 if score == "dot" else 8)),
        )
        first = at_probe if scope == "this_token" else 0
    kind = pick("add", "add", "attenuate", "observe")
    if kind == "observe" and scope == "this_token":
        return gate(when, scope, OBSERVE)
    if kind == "attenuate" and steered:
        return gate(when, scope, {"kind": "attenuate", "keep": float(pick(0.0, 0.25, 0.6))})
    sites = sorted({int(rng.integers(first, 8)) for _ in range(2)})
    return gate(when, scope, add(rows_at(5000 + seed, [SITES[at] for at in sites], 5.0), float(rng.choice([1, -0.8]))))
