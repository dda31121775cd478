"""The benchmark of the data path runs, and says of everything what was measured beside it."""

import json

from benchmarks import data


def test_samples_and_first_batch_are_measured(tmp_path, capsys):
    data.main(f"--only samples --tokens 1e6 --documents 1e6 --rounds 1 --json {tmp_path}/found.json".split())
    found = json.loads((tmp_path / "found.json").read_text())
    samples = found["samples"]
    assert samples["numpy memory-map slice"]["ratio"] == 1 and set(samples) > {"loader", "loader of a blend of 10"}
    assert all(numbers["samples_per_second"] > 0 for numbers in samples.values())
    assert found["first batch"]["1,000,000 documents"]["seconds"] > 0
    assert "samples, loader" in capsys.readouterr().out
