"""`make demo`: serves the bundled model, and shows plain, steered and gated answers side by side.

It goes through HTTP and the SDK like any user: start the server, register two vectors, send three requests for each
prompt. With `--json` the last line is one JSON object (`variants`: positive_share, prompts, texts, report).
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from steergate import Steering, SteeringClient, When, Where
from steergate.vectors import VectorSet
from steergate_server.demo.server import demo_server

HERE = Path(__file__).parent
TOKENS = 48


class Answers(NamedTuple):
    """One variant's texts by prompt, and the report of each, where one was asked for."""

    texts: list[str]
    reports: list[Any]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    facts = json.loads((HERE / "vectors" / "vectors.json").read_text())
    prompts = json.loads((HERE / "prompts.json").read_text())
    say = sys.stderr if arguments.json else sys.stdout
    print("Starting steergate-serve --demo (stock vLLM on this CPU) ...", file=say, flush=True)
    with demo_server() as (url, steering_key), SteeringClient(url, steering_api_key=steering_key) as client:
        register(client, facts)
        variants = run(client, facts, [prompt["text"] for prompt in prompts])
    show(variants, prompts, facts, say)
    if arguments.json:
        print(json.dumps({"variants": {name: summary(answers, prompts) for name, answers in variants.items()}}))


def register(client: SteeringClient, facts: dict[str, Any]) -> None:
    """Register the two vectors under the names that the plans use."""
    steer, probe = facts["steer"], facts["probe"]
    client.vectors.register(steer["name"], VectorSet.load(HERE / "vectors" / steer["file"]), kind="steer")
    client.vectors.register(probe["name"], VectorSet.load(HERE / "vectors" / probe["file"]), kind="probe")


def plans(facts: dict[str, Any]) -> dict[str, Steering | None]:
    """The three variants: no steering; a vector on every answer row; the same vector once a probe fires."""
    name, scale, probe = facts["steer"]["name"], facts["steer"]["scale"], facts["probe"]
    topic = When.probe(probe["name"], threshold=probe["threshold"], at="generated")
    return {
        "plain": None,
        "steered": Steering().vector(name, scale=scale, where=Where.answer()),
        "gated": Steering().gate(topic.scope("rest_of_request").add(name, strength=scale)).report("summary"),
    }


def run(client: SteeringClient, facts: dict[str, Any], prompts: list[str]) -> dict[str, Answers]:
    """Every prompt under every plan, greedily."""

    def ask(prompt: str, plan: Steering | None) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return client.chat(model="demo", messages=messages, steering=plan, temperature=0, max_tokens=TOKENS)

    variants = {}
    with ThreadPoolExecutor(16) as pool:
        for name, plan in plans(facts).items():
            replies = list(pool.map(partial(ask, plan=plan), prompts))
            variants[name] = Answers([reply.text for reply in replies], [reply.steering_report for reply in replies])
    return variants


def is_positive(text: str) -> bool:
    """Whether a text has more positive than negative words of the training script's two lists."""
    lexicon = json.loads((HERE / "lexicon.json").read_text())
    words = [word.strip(".,!?").lower() for word in text.split()]
    positive, negative = (sum(word in set(lexicon[side]) for word in words) for side in ("positive", "negative"))
    return positive > negative


def share(texts: list[str]) -> float:
    """Share of positive texts."""
    return sum(map(is_positive, texts)) / len(texts)


def summary(answers: Answers, prompts: list[dict[str, str]]) -> dict[str, Any]:
    """One variant as the JSON output tells it; the report is the sum over all requests."""
    return {
        "positive_share": share(answers.texts),
        "prompts": [prompt["text"] for prompt in prompts],
        "texts": answers.texts,
        "report": gate_totals(answers.reports),
    }


def gate_totals(reports: list[Any]) -> dict[str, Any] | None:
    """How often the gate looked and fired over all requests, and in each; None without gates."""
    gates: list[Any] = [report.choices[0].gates[0] for report in reports if report is not None]
    if not gates:
        return None
    return {
        "requests": len(gates),
        "requests_fired": sum(gate.fired > 0 for gate in gates),
        "evaluated": sum(gate.evaluated for gate in gates),
        "fired": sum(gate.fired for gate in gates),
        "gates": [
            {
                "evaluated": gate.evaluated,
                "fired": gate.fired,
                "first_fired": gate.first_fired,
                "last_fired": gate.last_fired,
                "max_score": gate.max_score,
            }
            for gate in gates
        ],
    }


def show(variants: dict[str, Answers], prompts: list[dict[str, str]], facts: dict[str, Any], out: Any) -> None:
    """A few prompts side by side, then what the gate did."""
    plain, steered, gated = (variants[name] for name in ("plain", "steered", "gated"))
    topic = facts["probe"]["topic"]
    shown = _sample(prompts, topic, [not is_positive(text) for text in plain.texts])
    for index in shown:
        print(f"\n{prompts[index]['text']}", file=out)
        for name, answers in variants.items():
            print(f"  {name:<8}{answers.texts[index].strip()}", file=out)
        gate = gated.reports[index].choices[0].gates[0]
        rows = f" (first {gate.first_fired}, last {gate.last_fired})" if gate.fired else ""
        print(f"  gate    fired at {gate.fired} of the {gate.evaluated} rows it looked at{rows}", file=out)
    here = [prompt["topic"] == topic for prompt in prompts]
    changed = [before != after for before, after in zip(plain.texts, gated.texts, strict=True)]
    inside = [text for text, is_here in zip(gated.texts, here, strict=True) if is_here]
    before = [text for text, is_here in zip(plain.texts, here, strict=True) if is_here]
    others = sum(change and not is_here for change, is_here in zip(changed, here, strict=True))
    rest = len(prompts) - sum(here)
    print(f"\nPositive answers to {len(prompts)} prompts: plain {share(plain.texts):.0%},", end=" ", file=out)
    print(f"steered {share(steered.texts):.0%}.", file=out)
    print(f"Gated on the {topic}: {share(before):.0%} -> {share(inside):.0%} of those prompts;", end=" ", file=out)
    print(f"{others} of the other {rest} answers changed.", file=out)


def _sample(prompts: list[dict[str, str]], topic: str, negative: list[bool]) -> list[int]:
    """Two prompts of the probe's topic and two of others, whose plain answers are negative where possible."""
    ranked = sorted(range(len(prompts)), key=lambda index: not negative[index])
    inside = [index for index in ranked if prompts[index]["topic"] == topic][:2]
    outside = [index for index in ranked if prompts[index]["topic"] != topic][:2]
    return inside + outside


if __name__ == "__main__":
    main()
