#!/usr/bin/env python3
"""Puts the numbers of benches/gpu.rs and benches/torch/gpu.py, or of benches/operators.rs and benches/torch/operators.py,
side by side, with the targets.

    python3 benches/torch/compare.py RESULTS.jsonl ... [--markdown FILE] [--json FILE]

A target is met or missed by the numbers as they are; a case that has none, or that one side lacks, says so. Exits with 0
whatever was missed: numbers are for reading, tests are for failing.
"""

import json
import re
import sys

# (cases, what is compared, at least or at most, the number). Later rows win.
TARGETS = [
    (r".* GB/s", "card", ">=", 0.85),
    (r"copy f32 GB/s", None, "", 0),
    (r"(uniform|normal) .* GB/s", "torch", ">=", 1.0),
    (r"dropout .* GB/s", "torch", ">=", 1.0),
    (r"attention .* TFLOP/s", "torch", ">=", 0.8),
    (r"matmul .* bf16 TFLOP/s", "torch", ">=", 0.95),
    (r"host .* us/op", "torch", "<=", 1 / 3),
    (r"step .* tokens/s", "torch", ">=", 1.0),
    (r"step nano .* tokens/s", "torch", ">=", 2.0),
    (r"step .* memory MiB", "torch", "<=", 1.0),
    (r".* exact .*", None, "", 0),
]
# The bounds of `cargo bench --bench operators`, on one thread of a CPU.
OPERATORS = [
    (r".*", "torch", ">=", 1.5),
    (r"(all|arg(max|min|sort)|attention|gather|index_\w+|log_softmax|matmul|logsumexp|max|mean|norm|prod|scatter\w*|softmax|sort|sum|topk|var)( .*)? \S+/s", "torch", ">=", 1.0),
]


def rival(case, torch):
    """The number of PyTorch's that a case is held against: of an exact case the ordinary one's; of a bf16 step the better
    of bf16 throughout and of autocast."""
    plain = case.replace(" exact", "")
    names = [plain, plain.replace(" bf16", " mixed")] if plain.startswith("step") else [plain]
    values = [torch[n] for n in names if n in torch]
    return (min if case.endswith("memory") else max)(values) if values else None


def target(case, unit, targets):
    found = None
    for pattern, against, sign, bound in targets:
        if re.fullmatch(pattern, f"{case} {unit}"):
            found = (against, sign, bound) if against else None
    return found


def number(value):
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def rows(sides, bench):
    ours, torch = sides["isoshard"], sides["torch"]
    # What the card does, as either side measured it: bytes copied, and products of bf16 matrices.
    card = {
        "GB/s": max((side["copy f32"][0] for side in (ours, torch) if "copy f32" in side), default=None),
        "TFLOP/s": max((v for side in (ours, torch) for c, (v, _) in side.items() if re.match("matmul .*bf16", c)), default=None),
    }
    rivals = {case: value for case, (value, _) in torch.items()}
    for case, (value, unit) in ours.items():
        other = rival(case, rivals)
        row = {"case": case, "unit": unit, "isoshard": value, "torch": other}
        row["of torch"] = value / other if other else None
        row["of card"] = value / card[unit] if card.get(unit) else None
        wanted = target(case, unit, OPERATORS if bench == "operators" else TARGETS)
        if wanted:
            against, sign, bound = wanted
            ratio = row[f"of {against}"]
            row["target"] = f"{sign} {bound:.2f} of {against}"
            met = ratio is not None and (ratio >= bound if sign == ">=" else ratio <= bound)
            row["met"] = "no number" if ratio is None else "met" if met else "MISSED"
        yield row
    for case, (value, unit) in torch.items():
        if case not in ours and not case.endswith(("mixed", "mixed memory")):
            yield {"case": case, "unit": unit, "isoshard": None, "torch": value}


def main():
    args, out = [], {"--markdown": None, "--json": None}
    words = iter(sys.argv[1:])
    for word in words:
        if word in out:
            out[word] = next(words)
        else:
            args.append(word)
    sides, notes, bench = {"isoshard": {}, "torch": {}}, [], ""
    for path in args:
        for line in open(path, encoding="utf-8"):
            if not line.startswith("{"):
                continue
            item = json.loads(line)
            if "case" in item:
                sides[item["side"]][item["case"]] = (item["value"], item["unit"])
                bench = item.get("bench", bench)
            else:
                notes.append(f"{item['side']}: " + ", ".join(f"{k} {' '.join(str(v).split())}" for k, v in item.items() if k not in ("bench", "side")))
    table = list(rows(sides, bench))
    columns = ("case", "unit", "isoshard", "torch", "of torch", "of card", "target", "met")
    text = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in table:
        cells = [row.get(c) for c in columns]
        text.append("| " + " | ".join(c if isinstance(c, str) else number(c) for c in cells) + " |")
    count = {word: sum(row.get("met") == word for row in table) for word in ("met", "MISSED", "no number")}
    text += ["", f"targets: {count['met']} met, {count['MISSED']} missed, {count['no number']} without a number", *notes]
    print("\n".join(text))
    if out["--markdown"]:
        open(out["--markdown"], "w", encoding="utf-8").write("\n".join(text) + "\n")
    if out["--json"]:
        json.dump({"rows": table, "notes": notes}, open(out["--json"], "w", encoding="utf-8"), indent=1)


if __name__ == "__main__":
    main()
