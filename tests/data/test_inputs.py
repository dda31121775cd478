"""Input files: compressed or not they read alike, in blocks of whole lines, from any place; damage is named."""

import bz2
import gzip
import os
import random

import pytest
import zstandard

from data_tools import inputs
from data_tools.inputs import Position, expand, file_blocks, line_blocks, numbered_lines

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 64)


def written(folder, content, ending=""):
    path = folder / f"x{ending}"
    path.write_bytes(COMPRESS[ending](content))
    return str(path)


def lines(seed=0, count=200):
    draw = random.Random(seed)
    return b"".join(draw.randbytes(draw.choice([0, 5, 30, 300])).replace(b"\n", b"?") + b"\n" for _ in range(count))


def numbered(blocks):
    return [
        (block.path, number, line)
        for block, _ in blocks
        for number, line in enumerate(block.content.removesuffix(b"\n").split(b"\n"), start=block.first)
    ]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("last", [b"", b"the last, without its newline"])
def test_blocks_are_whole_lines_and_together_the_file(tmp_path, ending, last):
    content = lines() + last
    path = written(tmp_path, content, ending)
    blocks = [block for block, _ in line_blocks([path, path], Position())]
    assert b"".join(block.content for block in blocks) == content * 2
    wanted = content.split(b"\n")
    for block in blocks[: len(blocks) // 2]:
        assert block.content.endswith(b"\n") or block is blocks[len(blocks) // 2 - 1]
        found = block.content.removesuffix(b"\n").split(b"\n")
        assert found == wanted[block.first - 1 : block.first - 1 + len(found)]
    assert [line.rstrip(b"\n") for _, line in numbered_lines(path)] == wanted[: None if last else -1]


@pytest.mark.parametrize("ending", COMPRESS)
def test_reading_goes_on_from_any_place(tmp_path, ending):
    paths = [written(tmp_path / f"{n}", lines(n, 40), ending) for n in range(3) if not (tmp_path / f"{n}").mkdir()]
    blocks = list(line_blocks(paths, Position()))
    for number in range(0, len(blocks), 7):
        rest = list(line_blocks(paths, blocks[number][1]))  # cut into other blocks, perhaps
        assert numbered(rest) == numbered(blocks[number + 1 :])
    assert blocks[-1][1].disk_bytes == sum(map(os.path.getsize, paths))
    places = [place.disk_bytes for _, place in blocks]
    assert places == sorted(places)


def test_zstandard_frames_follow_each_other_and_skippable_ones_are_skipped(tmp_path):
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    content = skippable + zstandard.compress(b"one\n") + zstandard.compress(b"two\n" * 50_000) + skippable
    (tmp_path / "x.zst").write_bytes(content)
    assert [block.content for block, _ in line_blocks([str(tmp_path / "x.zst")], Position())][0].startswith(
        b"one\ntwo\n"
    )
    assert len(list(numbered_lines(str(tmp_path / "x.zst")))) == 50_001


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_cut_or_damaged_files_are_named(tmp_path, ending):
    path = written(tmp_path, random.Random(1).randbytes(100_000), ending)
    good = (tmp_path / f"x{ending}").read_bytes()
    for bad in (good[:-10], b"no such format", good[:50_000] + b"!" * 100 + good[50_100:]):
        (tmp_path / f"x{ending}").write_bytes(bad)
        with pytest.raises(ValueError, match=rf"x\{ending}"):
            list(line_blocks([path], Position()))


def test_zstandard_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = written(tmp_path, b"a\n", ".zst")
    monkeypatch.setattr(inputs, "zstandard", None)
    with pytest.raises(ValueError, match=r"x\.zst: \.zst files need the package zstandard: pip install zstandard"):
        list(line_blocks([path], Position()))


def test_an_input_that_became_shorter_is_named(tmp_path):
    path = written(tmp_path, lines())
    with pytest.raises(ValueError, match="x is cut or damaged: .* bytes fewer than when the run was interrupted"):
        list(line_blocks([path], Position(0, 10, 10**6)))


def test_small_files_share_a_block(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}").write_bytes(b"x" * 10)
    paths = expand([str(tmp_path / "*")])
    blocks = list(file_blocks(paths, Position()))
    assert [len(block.paths) for block, _ in blocks] == [7, 7, 6]
    assert [path for block, _ in blocks for path in block.paths] == paths
    assert [block for block, _ in file_blocks(paths, blocks[0][1])] == [block for block, _ in blocks[1:]]
    assert [place.disk_bytes for _, place in blocks] == [70, 140, 200]


def test_directories_and_missing_files_are_named_and_patterns_pass_directories_by(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b").touch()
    (tmp_path / "in" / "a").touch()
    assert [os.path.basename(path) for path in expand([str(tmp_path / "in" / "*")])] == ["a", "b"]
    with pytest.raises(ValueError, match=r"--input .*in is a directory: name files, or a pattern such as '.*in/\*'"):
        expand([str(tmp_path / "in")])
    for missing in ("nowhere", "in/deep/*", "in/d*"):
        with pytest.raises(ValueError, match=f"--input .*{missing.replace('*', '.')}: there is no such file"):
            expand([str(tmp_path / missing)])
