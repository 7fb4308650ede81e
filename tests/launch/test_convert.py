import functools

from tests.fakes.launching import launch, lines_of_mistake

convert = functools.partial(launch, "convert")


def test_what_is_missing_is_asked_for():
    (line,) = lines_of_mistake(convert("--output=made"))
    assert line == "error: --source is missing; for example --source=smollm2-135m"
    (line,) = lines_of_mistake(convert("--source=smollm2-135m"))
    assert line == "error: --output is missing; for example --output=models/smollm2-135m"


def test_a_source_that_is_no_gguf_file_is_one_line(tmp_path):
    output = f"--output={tmp_path / 'made'}"
    (line,) = lines_of_mistake(convert("--source=no_such.gguf", output))
    assert line == (
        "error: --source (no_such.gguf) must be smollm2-135m or a .gguf file that exists"
    )
    (line,) = lines_of_mistake(convert(f"--source={tmp_path}", output))
    assert "is a directory and needs no conversion" in line
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing of use")
    (line,) = lines_of_mistake(convert(f"--source={broken}", output))
    assert "broken.gguf" in line
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("precious")
    lines = lines_of_mistake(convert("--source=smollm2-135m", f"--output={tmp_path / 'made'}"))
    assert len(lines) == 1
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["mine.txt"]
