import functools

from tests.fakes.launching import launch, lines_of_mistake

train_reward = functools.partial(launch, "train_reward", "--config=configs/train_reward.py")


def test_what_is_missing_is_asked_for(tmp_path):
    lines = lines_of_mistake(train_reward(f"--workdir={tmp_path / 'run'}"))
    assert [line.partition(" is empty")[0] for line in lines] == [
        "error: model.source",
        "error: data.files",
    ]
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_the_files_is_one_line(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "model").mkdir()
    arguments = (
        f"--config.model.source={tmp_path / 'model'}",
        f"--config.data.files={tmp_path / 'pairs.jsonl'}",
        f"--workdir={tmp_path / 'run'}",
    )
    (line,) = lines_of_mistake(train_reward(*arguments))
    assert "holds no config.json" in line
