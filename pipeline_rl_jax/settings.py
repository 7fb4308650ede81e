"""Settings: a `ConfigDict` section becomes a frozen, typed dataclass.

Owns the shape of every section and the error that a wrong one raises. Reading a `ConfigDict` is in
`settings_parsing.py`, ranges and what sections demand of each other in `settings_checks.py`.
Defaults live in `configs/base.py` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal


class SettingsError(ValueError):
    """What the person who started the run can mend.

    Each problem is one complete line: the setting, its value, the constraint, the way out. The
    command line shows the lines without a traceback and exits with code 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@contextlib.contextmanager
def settings_errors() -> Iterator[None]:
    """Turns a ValueError or OSError raised inside into a `SettingsError` of one line.

    For steps whose failure is the user's to mend: reading a model's config.json, opening a data
    file. Never around device work, where a ValueError is ours and needs its traceback.
    """
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError) as error:
        raise SettingsError(" ".join(str(error).split())) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    source: str
    init: Literal["pretrained", "random"]
    tokenizer: str
    compute_dtype: Literal["float32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "full", "dots"]
    attention_block_tokens: int
    logprob_chunk_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerMeshSettings:
    data: int
    fsdp: int
    tensor: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationMeshSettings:
    data: int
    tensor: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings:
    virtual_devices: int
    trainer_devices: tuple[int, ...]
    generation_devices: tuple[int, ...]
    reference_devices: tuple[int, ...]
    critic_devices: tuple[int, ...]
    offloaded: tuple[str, ...]
    scoring_devices: tuple[int, ...]
    trainer: TrainerMeshSettings
    generation: GenerationMeshSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticSettings:
    operations: str
    min_operand: int
    max_operand: int
    num_operands: int
    first_operand_tail: float
    num_records: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymSettings:
    task: str
    num_records: int
    options: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    source: Literal["arithmetic", "files", "reasoning_gym"]
    path: str
    format: Literal["auto", "gsm8k", "math", "orz", "dapo", "svamp", "mapped"]
    problem_field: str
    answer_field: str
    arithmetic: ArithmeticSettings
    reasoning_gym: ReasoningGymSettings
    template: Literal["plain", "few_shot", "chat"]
    prompt_format: str
    system_prompt: str
    few_shot_examples: tuple[str, ...]
    shuffle: bool
    num_epochs: int
    too_long: Literal["error", "drop"]
    incomplete: Literal["error", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    slots: int
    min_slots: int
    tokens_per_chunk: int
    chunk_candidates: tuple[int, ...]
    chunk_period_steps: int
    chunk_trial_steps: int
    max_prompt_tokens: int
    max_new_tokens: int
    prefill_buckets: tuple[int, ...]
    prompts_per_prefill: int
    min_cache_tokens: int
    kv_policy: Literal["keep", "recompute"]
    temperature: float
    top_k: int
    top_p: float
    stop_strings: tuple[str, ...]
    ignore_eos: bool
    compute_dtype: Literal["float32", "bfloat16"]
    cache_dtype: Literal["float32", "bfloat16"]

    @property
    def longest_chunk(self) -> int:
        """Tokens per slot that one call of the decode loop may write."""
        return max(self.tokens_per_chunk, *self.chunk_candidates, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings:
    correctness: Literal["exact_number", "boxed", "code", "user", "none"]
    correctness_weight: float
    format_pattern: str
    format_weight: float
    overlong_buffer_tokens: int
    overlong_weight: float
    user_function: str
    code_score: Literal["all", "share"]
    code_memory_bytes: int
    num_workers: int
    deadline_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    source: str
    weight: float
    streaming: bool
    rows: int
    chunk_widths: tuple[int, ...]
    min_cache_tokens: int
    param_dtype: Literal["float32", "bfloat16"]
    compute_dtype: Literal["float32", "bfloat16"]
    cache_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    group_size: int
    baseline: Literal["none", "group_mean", "leave_one_out", "batch_mean", "value", "gae"]
    value_coefficient: float
    value_clip: float
    gae_gamma: float
    gae_lambda: float
    critic: Literal["head", "model"]
    critic_source: str
    critic_learning_rate: float
    value_streaming: bool
    normalise_std: bool
    batch_normalise: bool
    std_floor: float
    loss: Literal["is_reinforce", "ppo", "cispo", "gspo", "dpo"]
    dpo_beta: float
    ratio_anchor: Literal["behaviour", "current"]
    importance_clamp: float
    clip_low: float
    clip_high: float
    dual_clip: float
    is_correction: Literal["none", "truncated", "masked"]
    is_lowest: float
    is_highest: float
    entropy_coefficient: float
    kl_coefficient: float
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["loss", "reward"]
    kl_control: Literal["fixed", "adaptive"]
    kl_target_nats: float
    kl_horizon_rollouts: int
    reference: str
    reference_dtype: Literal["compute", "float32", "bfloat16"]
    reference_streaming: bool
    aggregation: Literal["sequence_sum", "token_mean", "sequence_mean", "constant"]
    aggregation_constant: float
    truncated: Literal["train", "mask", "penalise", "bootstrap"]
    truncated_reward: float
    zero_variance: Literal["keep", "drop", "refill"]
    max_refill_share: float

    @property
    def needs_reference(self) -> bool:
        """True when a coefficient or the loss asks for the logprobs of the reference policy."""
        return self.kl_coefficient > 0 or self.loss == "dpo"

    @property
    def learns_values(self) -> bool:
        """True when the policy carries a value head."""
        return self.baseline == "value" or (self.baseline == "gae" and self.critic == "head")

    @property
    def has_critic_model(self) -> bool:
        """True when values come from a model of their own."""
        return self.baseline == "gae" and self.critic == "model"

    @property
    def prepares_batches(self) -> bool:
        """True when the trainer makes advantages from a forward pass before its updates."""
        return self.baseline == "gae" or self.loss == "dpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    batch_rollouts: int
    epochs: int
    minibatches: int
    tokens_per_row: int
    rows_per_micro_batch: int
    learning_rate: float
    learning_rate_schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_gradient_norm: float

    @property
    def updates_per_step(self) -> int:
        """Updates of the weights between two weight versions."""
        return self.epochs * self.minibatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class OvercommitSettings:
    variant: Literal["fixed", "additive", "proportional"]
    start_groups: int
    min_groups: int
    max_groups: int
    change_groups: int
    window_steps: int
    max_deferrals: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    name: Literal["conventional", "one_step_off", "pipeline", "oppo"]
    num_steps: int
    optimizer_steps_per_round: int
    overlap: bool
    max_lag: int
    beyond_max_lag: Literal["wait", "drop", "mask"]
    stream_groups: int
    overcommit: OvercommitSettings
    scores_in_flight: int
    deadline_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicationSettings:
    every_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    every_steps: int
    max_to_keep: int
    at_end: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    every_steps: int
    at_start: bool
    at_end: bool
    num_prompts: int
    path: str
    max_new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    tensorboard: bool
    flops_utilisation: bool
    progress: Literal["auto", "on", "off"]
    sample_completions: int
    sample_every_steps: int
    timeline: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    start_step: int
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. Every section is one attribute; `seed` seeds data order and sampling."""

    seed: int
    model: ModelSettings
    meshes: MeshSettings
    data: DataSettings
    generation: GenerationSettings
    rewards: RewardSettings
    reward_model: RewardModelSettings
    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    schedule: ScheduleSettings
    publication: PublicationSettings
    checkpointing: CheckpointSettings
    evaluation: EvaluationSettings
    telemetry: TelemetrySettings
    profile: ProfileSettings

    @property
    def num_updates(self) -> int:
        """Updates of the weights in the whole run: where learning-rate schedules end."""
        return self.schedule.num_steps * self.trainer.updates_per_step
