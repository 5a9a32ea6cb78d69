"""Trains the bundled demo model, extracts its steering vectors and checks that they steer.

    python tools/train_demo_model.py [--out DIR] [--steps N] [--seed N]

Weights come from training on the grammar of demo_corpus.py, vectors from the trained model's activations; nothing is
hand-set. The same command writes the same bytes on the same machine. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from operator import eq
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import demo_corpus as corpus
from demo_decoding import Decoded, Probe, Steer, activations, decode

ROOT = Path(__file__).resolve().parents[1]
THREADS = 1  # the same everywhere: it decides the order of additions, hence the weights
STEPS, BATCH, LENGTH, LEARNING_RATE = 600, 8, 256, 3e-3
DEMO_NAMES, HELD_OUT_NAMES = 50, 40  # of 256; no conversation of the training has one of these

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

PROBE_TOPIC = "hotel"
PROBE_LAYER, STEER_LAYERS = 2, (2, 3, 4)  # no steered layer before the probe: steering cannot disturb its scores
SCALES = tuple(i / 8 for i in range(4, 21))
CLEAR = 0.1  # the least distance of a score that matters from the threshold, as a share of the threshold
EARLY_ROWS = 5  # a gate must have fired within so many generated rows, before the first word of sentiment


def train_tokenizer(chats: Sequence[list[corpus.Message]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that merges every word of the corpus into one token; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[PAD, BOS, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for chat in chats for m in chat), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained Llama of 6 blocks, 128 wide, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,  # about 1/sqrt(width): with the usual 0.02 so short a training learns no copying
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


def packed_batches(
    sequences: Sequence[list[int]], answer: int, end: int, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per step: ids, labels (-100 outside answers), positions [BATCH, LENGTH]; a mask [BATCH, 1, LENGTH, LENGTH].

    Whole conversations are packed into a row; each has positions of its own and sees itself alone.
    """
    waiting = iter(sequences)
    pending = next(waiting)
    for _ in range(steps):
        ids, positions = torch.zeros(2, BATCH, LENGTH, dtype=torch.long)
        labels, owner = torch.full((2, BATCH, LENGTH), -100)
        for row in range(BATCH):
            start = 0
            while start + len(pending) <= LENGTH:
                stop, inside = start + len(pending), False
                ids[row, start:stop] = torch.tensor(pending)
                positions[row, start:stop] = torch.arange(len(pending))
                owner[row, start:stop] = start
                for column, token in enumerate(pending, start):
                    labels[row, column] = token if inside else -100
                    inside = token == answer or (inside and token != end)
                start, pending = stop, next(waiting)
        mask = (owner[:, None, :, None] == owner[:, None, None, :]).tril()
        yield ids, labels, positions, mask


def train(model: Any, tokenizer: Any, chats: Sequence[list[corpus.Message]], steps: int) -> None:
    """AdamW with warm-up and cosine decay, on the answers' tokens."""
    sequences = tokenizer.apply_chat_template(list(chats), tokenize=True, return_dict=False)
    answer = tokenizer.convert_tokens_to_ids(ROLES[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    warm_up = min(40, steps // 4 + 1)

    def rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    started = time.monotonic()
    batches = packed_batches(sequences, answer, tokenizer.eos_token_id, steps)
    for step, (ids, labels, positions, mask) in enumerate(batches):
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {output.loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)


def user(subject: corpus.Subject) -> list[corpus.Message]:
    """The conversation that asks about a subject."""
    return [{"role": "user", "content": subject.question}]


def to_ids(tokenizer: Any, messages: list[corpus.Message]) -> list[int]:
    """The token ids of a conversation, up to where the assistant's answer begins."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    return [int(token) for token in ids]


def extract(
    model: Any, tokenizer: Any, subjects: Sequence[corpus.Subject], rng: random.Random
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The sentiment vector, layer to [width], and the topic probe [width]: mean differences of block outputs.

    Each subject gets a positive and a negative review that differ in words of sentiment alone. The sentiment vector is
    the mean of positive minus negative over the rows from the first such word on. The probe is the mean over the first
    EARLY_ROWS generated rows (inputs are answer tokens) of reviews of PROBE_TOPIC, minus that of the other topics,
    of unit length. Later rows would add what single nouns of one topic look like, which says little about topics.
    """
    differences: list[torch.Tensor] = []
    rows: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for subject in subjects:
        prompt, seed = to_ids(tokenizer, user(subject)), rng.random()
        answers = [
            tokenizer.encode(corpus.review(subject, sentiment, random.Random(seed)), add_special_tokens=False)
            for sentiment in ("positive", "negative")
        ]
        good, bad = (activations(model, prompt + answer)[:, len(prompt) :] for answer in answers)
        first = next(i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b)
        differences.append(good[:, first:] - bad[:, first:])
        rows[subject.topic == PROBE_TOPIC].append(good[PROBE_LAYER, :EARLY_ROWS])  # no sentiment yet: good equals bad
    sentiment = torch.cat(differences, dim=1).mean(dim=1)
    probe = torch.cat(rows[True]).mean(dim=0) - torch.cat(rows[False]).mean(dim=0)
    return {layer: sentiment[layer].clone() for layer in STEER_LAYERS}, probe / probe.norm()


class Demo:
    """A model with prompts about some subjects, decoded greedily."""

    def __init__(self, model: Any, tokenizer: Any, subjects: Sequence[corpus.Subject]) -> None:
        self.model, self.tokenizer, self.subjects = model, tokenizer, subjects
        self.prompts = [to_ids(tokenizer, user(subject)) for subject in subjects]

    def run(self, **how: Any) -> list[Decoded]:
        """One answer per subject (arguments: see `decode`)."""
        return decode(self.model, self.prompts, self.tokenizer.eos_token_id, **how)

    def texts(self, answers: Sequence[Decoded]) -> list[str]:
        """The answers' texts, without special tokens."""
        return [self.tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]

    def positive(self, answers: Sequence[Decoded]) -> list[bool]:
        """Which answers have more positive than negative words."""
        return [corpus.is_positive(text) for text in self.texts(answers)]

    def formed(self, answers: Sequence[Decoded]) -> list[bool]:
        """Which answers end by themselves and are such as the grammar can produce about their subject."""
        pairs = zip(self.texts(answers), self.subjects, answers, strict=True)
        return [answer.finished and corpus.well_formed(text, subject) for text, subject, answer in pairs]

    def peaks(self, answers: Sequence[Decoded]) -> tuple[list[float], list[float]]:
        """The answers' highest scores: about PROBE_TOPIC, of the first EARLY_ROWS; about others, of all rows."""
        pairs = list(zip(self.subjects, answers, strict=True))
        inside = [max(a.scores[:EARLY_ROWS]) for s, a in pairs if s.topic == PROBE_TOPIC]
        return inside, [max(a.scores) for s, a in pairs if s.topic != PROBE_TOPIC]


def calibrate(demo: Demo, vectors: dict[int, torch.Tensor], probe: Probe) -> tuple[float, Probe]:
    """The scale, and the probe with its threshold, from answers about held-out names.

    The threshold lies halfway between the highest score of another topic and the lowest early peak of the probe's.
    The scale is the middle one of those in SCALES at which every answer is positive and well-formed.
    """
    inside, outside = demo.peaks(demo.run(probe=probe))
    threshold = (min(inside) + max(outside)) / 2
    print(f"scores: {max(outside):.2f} at most elsewhere, {min(inside):.2f} at least in {PROBE_TOPIC} (held-out names)")
    passing = []
    for scale in SCALES:
        answers = demo.run(steer=Steer(vectors, scale))
        positive, formed = fmean(demo.positive(answers)), fmean(demo.formed(answers))
        print(f"scale {scale:.3f}: {positive:4.0%} positive, {formed:4.0%} well-formed (held-out names)")
        if positive == formed == 1:
            passing.append(scale)
    scale = passing[len(passing) // 2] if passing else SCALES[-1]
    return scale, Probe(probe.layer, probe.vector, round(threshold, 2))


Check = tuple[str, float, float, float]  # what, measured, least and most allowed


def check_texts(demo: Demo, steer: Steer) -> list[Check]:
    """Form and sentiment of plain and steered answers."""
    plain, steered = demo.run(), demo.run(steer=steer)
    turned = demo.run(steer=Steer(steer.vectors, -steer.scale))
    texts = [*demo.texts(plain), *(subject.question for subject in demo.subjects), "Größe 12 µm\n\t{x} 你好 🙂"]
    encoded = [demo.tokenizer.encode(text) for text in texts]
    round_trips = [demo.tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded]
    return [
        ("tokenizer: share of texts that round-trip", fmean(map(eq, texts, round_trips)), 1, 1),
        ("plain: share positive", fmean(demo.positive(plain)), 0.35, 0.65),
        ("plain: share well-formed", fmean(demo.formed(plain)), 1, 1),
        ("plain: least gap between the two highest logits", min(a.smallest_gap for a in plain), 0.05, math.inf),
        ("steered: share positive", fmean(demo.positive(steered)), 0.95, 1),
        ("steered: share well-formed", fmean(demo.formed(steered)), 0.95, 1),
        ("steered: least gap between the two highest logits", min(a.smallest_gap for a in steered), 0, math.inf),
        ("steered with the scale negated: share positive", fmean(demo.positive(turned)), 0, 0.05),
    ]


def check_gate(demo: Demo, steer: Steer, probe: Probe) -> list[Check]:
    """What the gated plan (probe, rest of request, add) does to the probe's topic and to the others."""
    plain, gated = demo.run(), demo.run(steer=steer, probe=probe, gated=True)
    positive, formed, was_positive = demo.positive(gated), demo.formed(gated), demo.positive(plain)
    first = [answer.first_fired(probe.threshold) for answer in gated]
    same = [a.ids == b.ids for a, b in zip(plain, gated, strict=True)]
    hits = [i for i, subject in enumerate(demo.subjects) if subject.topic == PROBE_TOPIC]
    others = [i for i, subject in enumerate(demo.subjects) if subject.topic != PROBE_TOPIC]
    return [
        (f"gated, {PROBE_TOPIC}: share positive", fmean(positive[i] for i in hits), 0.9, 1),
        (f"gated, {PROBE_TOPIC}: share well-formed", fmean(formed[i] for i in hits), 0.95, 1),
        (f"gated, {PROBE_TOPIC}: negatives changed", fmean(not same[i] for i in hits if not was_positive[i]), 0.9, 1),
        (f"gated, {PROBE_TOPIC}: share that fired", fmean(first[i] is not None for i in hits), 1, 1),
        (f"gated, {PROBE_TOPIC}: last row of a first firing", max(first[i] or 0 for i in hits), 0, EARLY_ROWS - 1),
        ("gated, other topics: share that fired", fmean(first[i] is not None for i in others), 0, 0),
        ("gated, other topics: share equal to plain", fmean(same[i] for i in others), 1, 1),
    ]


def check_scores(demo: Demo, steer: Steer, probe: Probe) -> list[Check]:
    """How far the probe's scores keep from the threshold, also under the steering that the probe may turn on."""
    checks: list[Check] = []
    for name, how in (("plain", {}), ("steered", {"steer": steer})):
        inside, outside = demo.peaks(demo.run(probe=probe, **how))
        above, below = probe.threshold * (1 + CLEAR), probe.threshold * (1 - CLEAR)
        checks.append((f"{name}: least early peak of the score, {PROBE_TOPIC}", min(inside), above, math.inf))
        checks.append((f"{name}: highest score, other topics", max(outside), -math.inf, below))
    return checks


def report(checks: Sequence[Check]) -> bool:
    """Print the table of checks; whether all hold."""
    print(f"\n{'check':<52} {'measured':>9}  allowed")
    for name, measured, least, most in checks:
        verdict = "" if least <= measured <= most else "  FAILED"
        print(f"{name:<52} {measured:>9.3f}  {least:.3f} to {most:.3f}{verdict}")
    return all(least <= measured <= most for _, measured, least, most in checks)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_vectors(folder: Path, steer: Steer, probe: Probe, width: int) -> None:
    """Write the two vector files and vectors.json, which says what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    probe_name = f"topic_{PROBE_TOPIC}"
    save_file({f"layer.{layer}": row for layer, row in steer.vectors.items()}, folder / "positive.safetensors")
    save_file({f"layer.{probe.layer}": probe.vector}, folder / f"{probe_name}.safetensors")
    steer_text = (
        "Mean, over reviews written by the training grammar in pairs that differ in words of sentiment alone, of the "
        "block output in the positive review minus that in the negative one, over the rows from the first such word "
        "on. The scale is the middle one of those at which every greedy answer to held-out prompts was positive and "
        "well-formed. A negative scale turns answers negative."
    )
    probe_text = (
        f"Mean of the block output over the first {EARLY_ROWS} generated rows of reviews of a {PROBE_TOPIC}, minus the "
        "same mean over reviews of the other topics; unit length. The threshold, for the raw dot product, lies halfway "
        f"between the highest score at any generated row of another topic and the lowest peak of a {PROBE_TOPIC}'s "
        f"first {EARLY_ROWS} generated rows, in greedy answers to held-out prompts."
    )
    common = {"hook": "post_block", "width": width}
    write_json(
        folder / "vectors.json",
        {
            "steer": {"name": "positive", "file": "positive.safetensors", **common}
            | {"layers": list(steer.vectors), "scale": steer.scale, "description": steer_text},
            "probe": {"name": probe_name, "file": f"{probe_name}.safetensors", **common}
            | {"layer": probe.layer, "threshold": probe.threshold, "topic": PROBE_TOPIC, "description": probe_text},
        },
    )


def build_model(folder: Path, names: Sequence[corpus.Name], rng: random.Random, steps: int, seed: int) -> None:
    """Train tokenizer and model on conversations about these names and save both."""
    conversations = [corpus.chat(names, rng) for _ in range(steps * BATCH * LENGTH // 50 + 5000)]
    tokenizer = train_tokenizer(conversations[:5000])
    model = new_model(tokenizer, seed)
    train(model, tokenizer, conversations, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def main() -> int:
    """Train, save, extract, calibrate on held-out names, check on the demo's names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "server" / "steergate_server" / "demo", metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    disable_progress_bar()

    rng = random.Random(args.seed)
    demo_names, held_out, names = corpus.split_names(rng, (DEMO_NAMES, HELD_OUT_NAMES))
    build_model(args.out / "model", names, rng, args.steps, args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.out / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.out / "model")

    vectors, direction = extract(model, tokenizer, corpus.subjects(names), rng)
    held_out_demo = Demo(model, tokenizer, corpus.subjects(held_out))
    scale, probe = calibrate(held_out_demo, vectors, Probe(PROBE_LAYER, direction))
    steer = Steer(vectors, scale)
    save_vectors(args.out / "vectors", steer, probe, model.config.hidden_size)

    for path in args.out.rglob("*.safetensors"):  # written for their owner alone; a package's files are for everyone
        path.chmod(0o644)

    demo = Demo(model, tokenizer, corpus.subjects(demo_names))
    write_json(args.out / "prompts.json", [{"topic": s.topic, "text": s.question} for s in demo.subjects])
    write_json(args.out / "lexicon.json", corpus.LEXICON)
    print(f"\n{model.num_parameters():,} parameters; scale {scale}; probe threshold {probe.threshold}")
    checks = check_texts(demo, steer) + check_gate(demo, steer, probe) + check_scores(demo, steer, probe)
    return 0 if report(checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
