"""Writes a JSONL corpus, {"text": ..., "source": ...} on each line, from files that every machine has.

Without --folder it takes the sources of Python's own standard library, tests last, up to --max-megabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.command import make_folder_of  # noqa: E402

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
TESTS = {"test", "tests", "idle_test"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSONL file to write")
    parser.add_argument("--folder", help="folder to take; default: Python's standard library")
    parser.add_argument("--pattern", default="**/*.py", help="which files below the folder; default: **/*.py")
    parser.add_argument("--max-megabytes", type=float, default=20.0, help="text to take at most; default: 20")
    return parser.parse_args(argv)


def order_of_choice(path: Path) -> tuple[bool, str]:
    """What is not a test comes first, then by name."""
    return bool(TESTS & set(path.parts)), path.as_posix()


def choose(folder: Path, pattern: str, max_bytes: int) -> tuple[list[tuple[str, str]], int]:
    """Name and text of each file taken, and the number of files left out because they are not UTF-8."""
    paths = [path.relative_to(folder) for path in folder.glob(pattern) if path.is_file()]
    chosen, size, not_text = [], 0, 0
    for path in sorted((p for p in paths if not NOT_LIBRARY & set(p.parts)), key=order_of_choice):
        content = (folder / path).read_bytes()
        if size + len(content) > max_bytes:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            not_text += 1
            continue
        if text.strip():
            chosen.append((path.as_posix(), text))
            size += len(content)
    return chosen, not_text


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    folder = Path(args.folder or sysconfig.get_path("stdlib"))
    chosen, not_text = choose(folder, args.pattern, int(args.max_megabytes * 1e6))
    if not chosen:
        sys.exit(
            f"make_corpus.py: error: no text in files {args.pattern} of --folder {folder}, {args.max_megabytes} MB"
        )
    # by a hash of the name, so that each part of a split by documents is like the whole
    chosen.sort(key=lambda item: hashlib.blake2b(item[0].encode("utf-8", "surrogateescape")).digest())
    output = Path(args.output)
    try:
        make_folder_of("--output", output)
    except ValueError as error:
        sys.exit(f"make_corpus.py: error: {error}")
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            for source, text in chosen:
                file.write(json.dumps({"text": text, "source": source}) + "\n")
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    size = sum(len(text.encode("utf-8")) for _, text in chosen)
    summary = {
        "documents": len(chosen),
        "bytes": size,
        "not_text": not_text,
        "folder": str(folder),
        "output": str(output),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
