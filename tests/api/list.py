#!/usr/bin/env python3
"""Lists the public API from rustdoc's JSON: one line per item, its kind and its path, sorted.

    tests/api/list.py                     writes tests/golden/public_api.txt (needs a nightly toolchain's rustdoc)
    tests/api/list.py --check             exits with 1 if that file is not what it would write
    tests/api/list.py OLD.json            prints the listing of a JSON file
    tests/api/list.py OLD.json NEW.json   prints what was removed and what was added, in Markdown

The JSON: cargo +nightly rustdoc --lib --features cuda,nccl,mpi,testing -- -Z unstable-options --output-format json
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LISTING = ROOT / "tests/golden/public_api.txt"


def listing(document):
    """Returns the sorted lines of a rustdoc JSON document."""
    index = document["index"]
    lines = set()

    def item(id):
        return index.get(str(id))

    def is_public(found):
        return found["visibility"] in ("public", "default")

    def add(kind, path):
        lines.add(f"{kind} {path}")

    def members(ids, path):
        """Adds fields, variants and the items of traits and inherent impls."""
        for found in filter(None, map(item, ids)):
            kind, inner = next(iter(found["inner"].items()))
            if not is_public(found):
                continue
            if kind == "impl":
                if inner["trait"] is None:
                    members(inner["items"], path)
                continue
            name = {"function": "fn", "struct_field": "field", "assoc_const": "const", "assoc_type": "type"}
            add(name.get(kind, kind), f"{path}::{found['name']}")
            if kind == "variant" and "struct" in inner["kind"]:
                members(inner["kind"]["struct"]["fields"], f"{path}::{found['name']}")

    def visit(id, path, name=None, seen=()):
        """Adds an item and all that is reached by it, under the path that leads there."""
        found = item(id)
        if found is None or not is_public(found):
            return
        kind, inner = next(iter(found["inner"].items()))
        if kind == "use":
            target = item(inner["id"]) if inner["id"] is not None else None
            # The prelude's names have their members in the modules that they come from.
            if target is None or path.endswith("::prelude"):
                add("use", f"{path}::{inner['name']} = {inner['source']}")
            elif inner["is_glob"]:
                names = next(iter(target["inner"].values()))
                for child in names.get("items", names.get("variants", [])):
                    visit(child, path, None, seen)
            else:
                visit(inner["id"], path, inner["name"], seen)
            return
        here = f"{path}::{name or found['name']}" if path else found["name"]
        if kind == "module":
            add("mod", here)
            if id not in seen:
                for child in inner["items"]:
                    visit(child, here, None, (*seen, id))
        elif kind == "struct":
            add("struct", here)
            shape = inner["kind"]
            if isinstance(shape, dict) and "plain" in shape:
                members(shape["plain"]["fields"], here)
            elif isinstance(shape, dict) and "tuple" in shape:
                members([field for field in shape["tuple"] if field is not None], here)
            members(inner["impls"], here)
        elif kind in ("enum", "union"):
            add(kind, here)
            members(inner.get("variants", []) + inner.get("fields", []) + inner["impls"], here)
        elif kind == "trait":
            add("trait", here)
            members(inner["items"], here)
        else:
            add({"function": "fn", "type_alias": "type", "constant": "const"}.get(kind, kind), here)

    visit(document["root"], "")
    return sorted(lines)


def current():
    """Returns the listing of the working tree, or None without a nightly rustdoc."""
    if subprocess.run(["cargo", "+nightly", "--version"], capture_output=True, check=False).returncode:
        return None
    command = ["cargo", "+nightly", "rustdoc", "--quiet", "--lib", "--features", "cuda,nccl,mpi,testing"]
    command += ["--target-dir", "target/api", "--", "-Z", "unstable-options", "--output-format", "json"]
    subprocess.run(command, cwd=ROOT, check=True)
    return listing(json.loads((ROOT / "target/api/doc/isoshard.json").read_text()))


def changes(old, new):
    """Prints the lines that only one of two listings has; members of a removed or an added item are left out."""
    for title, these, those in (("Removed", old, set(new)), ("Added", new, set(old))):
        only = [line for line in these if line not in those]
        paths = {line.split(" ", 1)[1] for line in only}
        only = [line for line in only if line.split(" ", 1)[1].rsplit("::", 1)[0] not in paths]
        print(f"## {title}: {len(only)}\n")
        print("\n".join(f"- `{line}`" for line in only), end="\n\n")


def main(arguments):
    files = [argument for argument in arguments if argument != "--check"]
    listings = [listing(json.loads(pathlib.Path(file).read_text())) for file in files]
    if len(listings) == 1:
        print("\n".join(listings[0]))
    elif len(listings) == 2:
        changes(*listings)
    else:
        new = current()
        if new is None:
            print("SKIPPED (no nightly rustdoc): the listing of the public API")
        elif "--check" not in arguments:
            LISTING.write_text("\n".join(new) + "\n")
        elif (old := LISTING.read_text().splitlines()) != new:
            changes(old, new)
            print(f"{LISTING.relative_to(ROOT)} is not up to date: run tests/api/list.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
