"""What sections demand of each other: one complete line each."""

import pytest

from pipeline_rl_jax.settings import (
    ArithmeticSettings,
    GenerationMeshSettings,
    ReasoningGymSettings,
    SettingsError,
    TrainerMeshSettings,
)
from pipeline_rl_jax.settings_checks import find_problems
from pipeline_rl_jax.settings_meshes import check_devices
from tests.fakes.settings import make_settings
from tests.fakes.stages import make_overcommit


def trainer_mesh(data=1, fsdp=-1, tensor=1):
    return TrainerMeshSettings(data=data, fsdp=fsdp, tensor=tensor)


def arithmetic(**changes):
    values = {"operations": "+", "min_operand": 0, "max_operand": 9, "num_operands": 2}
    values["first_operand_tail"] = 0.0
    return ArithmeticSettings(**{**values, "num_records": 100, **changes})


def test_defaults_are_consistent():
    assert find_problems(make_settings()) == []


# Each entry: changes by section, then the words that the only problem must hold.
PROBLEMS = {
    "no model": ({"model": {"source": ""}}, "model.source ('') must name a model"),
    "batch and group": (
        {"trainer": {"batch_rollouts": 12}},
        "trainer.batch_rollouts (12) must be a multiple of algorithm.group_size (8); use 8 or 16",
    ),
    "batch below a group": (
        {"trainer": {"batch_rollouts": 3}},
        "trainer.batch_rollouts (3) must be a multiple of algorithm.group_size (8); use 8",
    ),
    "rows too short": (
        {"trainer": {"tokens_per_row": 9000}},
        "use 9216 or more",  # 1024 + 8192
    ),
    "buckets do not reach": (
        {"generation": {"prefill_buckets": (64, 512)}},
        "generation.prefill_buckets (64, 512) must reach max_prompt_tokens (1024)",
    ),
    "no buckets": ({"generation": {"prefill_buckets": ()}}, "end it with 1024"),
    "buckets not ascending": (
        {"generation": {"prefill_buckets": (512, 64, 64, 1024)}},
        "must ascend from 1 or more; use (64, 512, 1024)",
    ),
    "greedy training": (
        {"generation": {"temperature": 0.0}},
        "generation.temperature (0.0) must be more than 0",
    ),
    "empty stop string": ({"generation": {"stop_strings": ("a", "")}}, "generation.stop_strings"),
    "no user function": (
        {"rewards": {"correctness": "user"}},
        'write "package.module:function"',
    ),
    "user function not a path": (
        {"rewards": {"correctness": "user", "user_function": "just_a_name"}},
        "rewards.user_function ('just_a_name') must name a function",
    ),
    "user function never called": (
        {"rewards": {"user_function": "a.b:c"}},
        "is only called when rewards.correctness (boxed) is user",
    ),
    "format weight without pattern": (
        {"rewards": {"format_weight": 0.5}},
        "rewards.format_weight (0.5) needs rewards.format_pattern",
    ),
    "bad pattern": ({"rewards": {"format_pattern": "("}}, "must be a regular expression"),
    "overlong buffer": (
        {"rewards": {"overlong_buffer_tokens": 8192}},
        "must be below generation.max_new_tokens (8192); use 2048, or 0 for off",
    ),
    "warm-up longer than the run": (
        {"trainer": {"warmup_steps": 1000}},
        "trainer.warmup_steps (1000) must be below schedule.num_steps (1000); use 100",
    ),
    "weights published too rarely": (
        {"schedule": {"max_lag": 2}, "publication": {"every_steps": 4}},
        "use at most 3, or a max_lag of 3 or more",
    ),
    "stream below a batch": (
        {"schedule": {"stream_groups": 100}},
        "use 128 or more, or 0",  # 1024 / 8 groups
    ),
    "overcommit beyond what can be put off": (
        {"schedule": {"name": "oppo", "overcommit": make_overcommit(max_deferrals=0)}},
        "schedule.overcommit.start_groups (2) must be 0 to 0 with variant fixed",
    ),
    "overcommit outside its bounds": (
        {
            "schedule": {
                "name": "oppo",
                "overcommit": make_overcommit(variant="additive", start_groups=9),
            }
        },
        "schedule.overcommit.start_groups (9) must be 0 to 8 with variant additive",
    ),
    "overcommit that cannot be reached": (
        {
            "schedule": {
                "name": "oppo",
                "overcommit": make_overcommit(variant="additive", max_groups=300),
            }
        },
        "schedule.overcommit.max_groups (300) is more than max_deferrals * groups of a batch (256)",
    ),
    "impatient schedule": (
        {"schedule": {"deadline_seconds": 5.0}},
        "must be more than rewards.deadline_seconds (5.0)",
    ),
    "long evaluation": (
        {"evaluation": {"max_new_tokens": 9000}},
        "must be at most generation.max_new_tokens (8192)",
    ),
    "profile after the end": (
        {"profile": {"start_step": 999, "num_steps": 3}},
        "reach step 1001, past schedule.num_steps (1000)",
    ),
    "files without path": ({"data": {"source": "files"}}, "data.path ('') must name a file"),
    "mapped without field": (
        {"data": {"source": "files", "path": "a", "format": "mapped", "answer_field": "b"}},
        "data.problem_field ('') must name a field",
    ),
    "unknown operation": (
        {"data": {"arithmetic": arithmetic(operations="+/")}},
        "data.arithmetic.operations ('+/') must be some of + - *",
    ),
    "empty operand range": (
        {"data": {"arithmetic": arithmetic(min_operand=10)}},
        "data.arithmetic.min_operand (10) must be at most max_operand (9)",
    ),
    "prompt without problem": (
        {"data": {"prompt_format": "Answer:"}},
        "data.prompt_format ('Answer:') must hold {problem}",
    ),
    "prompt with a stray brace": (
        {"data": {"prompt_format": "{problem} \\boxed{"}},
        "is no format string",
    ),
    "prompt as a number": (
        {"data": {"prompt_format": "{problem:d}"}},
        "data.prompt_format ('{problem:d}') cannot be filled in: Unknown format code 'd'",
    ),
    "no example": ({"data": {"template": "few_shot"}}, "data.few_shot_examples ()"),
    "example without answer": (
        {"data": {"template": "few_shot", "few_shot_examples": ("1 + 1",)}},
        "data.few_shot_examples[0] ('1 + 1') must separate problem and answer",
    ),
    "no devices": ({"meshes": {"trainer_devices": ()}}, "meshes.trainer_devices () must name"),
    "device twice": (
        {"meshes": {"trainer_devices": (0, 1, 0)}},
        "must name each device once; use (0, 1)",
    ),
    "negative device": ({"meshes": {"generation_devices": (-1,)}}, "indices from 0 on"),
    "beyond the virtual devices": (
        {"meshes": {"virtual_devices": 2, "generation_devices": (2,)}},
        "must be below meshes.virtual_devices (2); set meshes.virtual_devices=3",
    ),
    "meshes overlap": (
        {"meshes": {"trainer_devices": (0, 1), "generation_devices": (1, 2)}},
        "share [1]; give each side devices of its own",
    ),
    "two open axes": (
        {"meshes": {"trainer": trainer_mesh(data=-1)}},
        "meshes.trainer (data=-1, fsdp=-1, tensor=1) may have -1 once",
    ),
    "axis of zero": (
        {"meshes": {"trainer": trainer_mesh(tensor=0)}},
        "meshes.trainer.tensor (0) must be 1 or more, or -1 for the rest",
    ),
    "axes do not divide": (
        {
            "meshes": {
                "trainer_devices": (0, 1, 2, 3),
                "generation_devices": (4,),
                "trainer": trainer_mesh(tensor=3),
            }
        },
        "the fixed axes take 3, which must divide the 4 of meshes.trainer_devices; make their "
        "product one of [1, 2, 4]",
    ),
    "axes leave devices over": (
        {
            "meshes": {
                "generation_devices": (1, 2, 3, 4),
                "generation": GenerationMeshSettings(data=2, tensor=1),
            }
        },
        "meshes.generation (data=2, tensor=1) uses 2 devices but meshes.generation_devices lists 4",
    ),
    "slots over data parallel generation": (
        {
            "meshes": {
                "generation_devices": (1, 2, 3),
                "generation": GenerationMeshSettings(data=3, tensor=1),
            }
        },
        "generation.slots (64) must be a multiple of the 3 parts that the generation mesh's data "
        "axis splits them into; use 63 or 66",
    ),
    "reference without use": (
        {"meshes": {"reference_devices": (1,)}},
        "meshes.reference_devices (1,) are only used when algorithm.kl_coefficient (0.0) is more",
    ),
    "reference on the trainer's device": (
        {"meshes": {"reference_devices": (0, 1)}, "algorithm": {"kl_coefficient": 0.1}},
        "meshes.reference_devices (0, 1) shares [0] with the trainer or with generation",
    ),
    "rows over the reference": (
        {"meshes": {"reference_devices": (1, 2, 3)}, "algorithm": {"kl_coefficient": 0.1}},
        "trainer.rows_per_micro_batch (8) must be a multiple of the 3 meshes.reference_devices",
    ),
    "ratio twice": (
        {"algorithm": {"is_correction": "truncated"}},
        "algorithm.is_correction (truncated) weighs tokens by current / behaviour",
    ),
    "rows over an open axis": (
        {
            "meshes": {"trainer_devices": (0, 1, 2, 3), "generation_devices": (4,)},
            "trainer": {"rows_per_micro_batch": 6},
        },
        "must be a multiple of the trainer mesh's data x fsdp (4); use 4 or 8",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem_is_told_alone_and_whole(name):
    changes, words = PROBLEMS[name]
    (problem,) = find_problems(make_settings(**changes))
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize("options", ["{", "[1]", "3"], ids=["not JSON", "a list", "a number"])
def test_options_must_be_a_json_object(options):
    gym = ReasoningGymSettings(task="chain_sum", num_records=10, options=options)
    (problem,) = find_problems(
        make_settings(data={"source": "reasoning_gym", "reasoning_gym": gym})
    )
    assert problem.startswith(f"data.reasoning_gym.options ({options!r}) must be a JSON object")


def test_task_must_be_named():
    gym = ReasoningGymSettings(task="", num_records=10, options="{}")
    (problem,) = find_problems(
        make_settings(data={"source": "reasoning_gym", "reasoning_gym": gym})
    )
    assert problem.startswith("data.reasoning_gym.task ('') must name")


def test_conflicts_are_told_together():
    settings = make_settings(
        trainer={"batch_rollouts": 12, "tokens_per_row": 10}, generation={"temperature": 0.0}
    )
    assert len(find_problems(settings)) == 3


def test_lag_bounds_publication_in_pipeline_only():
    changes = {
        "schedule": {"max_lag": 0, "name": "conventional"},
        "publication": {"every_steps": 3},
    }
    assert find_problems(make_settings(**changes)) == []


def test_the_same_single_device_may_serve_both_sides():
    assert (
        find_problems(make_settings(meshes={"trainer_devices": (3,), "generation_devices": (3,)}))
        == []
    )


def test_four_and_four_devices():
    meshes = {
        "virtual_devices": 8,
        "trainer_devices": (0, 1, 2, 3),
        "generation_devices": (4, 5, 6, 7),
        "trainer": trainer_mesh(fsdp=2, tensor=2),
        "generation": GenerationMeshSettings(data=2, tensor=2),
    }
    assert find_problems(make_settings(meshes=meshes)) == []


def test_devices_that_this_process_lacks():
    settings = make_settings(meshes={"trainer_devices": (0, 1), "generation_devices": (7,)})
    check_devices(settings, 8)
    with pytest.raises(SettingsError) as caught:
        check_devices(settings, 4)
    assert caught.value.problems == (
        "meshes.generation_devices (7,) names device 7 but this process has 4: use indices 0 to 3, "
        "or on CPU set meshes.virtual_devices=8",
    )
    with pytest.raises(SettingsError) as caught:
        check_devices(settings, 1)
    assert len(caught.value.problems) == 2
