"""Every metric and span a run may report, with its unit and what it says.

One schema for `metrics.jsonl`, TensorBoard, the progress display and the documentation. A metric
is declared here before it is written; the tests run with undeclared names refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class Metric:
    """Unit and meaning. A share is between 0 and 1; "1" marks a number without unit."""

    unit: str
    description: str


# Names of `span(...)`. Time in which a stage had nothing to do is under waits/, not here.
SPANS: Mapping[str, str] = {
    "prefill": "computing the cache of new prompts",
    "insert": "putting prefilled prompts into slots",
    "decode_chunk": "one call of Engine.generate, up to tokens_per_chunk tokens a slot",
    "weight_swap": "handing newer weights to the decode loop at a chunk border",
    "publish": "casting and sending the weights of a step to the generation mesh",
    "reward": "scoring a completion",
    "score_chunk": "a model reading what is being written, and the rest of what has ended",
    "score_texts": "a reward model reading whole texts in one device call",
    "preprocess": "packing, reference logprobs and advantages of one batch",
    "reference": "logprobs of one batch under the reference policy, until they are there",
    "train_step": "forward, backward and optimizer of one step, until its results are there",
    "evaluate": "greedy evaluation",
    "checkpoint": "time a save holds up the trainer",
}

_SPAN_METRICS: Mapping[str, Metric] = {
    **{f"spans/{name}_seconds": Metric("seconds", text) for name, text in SPANS.items()},
    **{
        f"spans/{name}_share": Metric("share", f"{text}; of wall time")
        for name, text in SPANS.items()
    },
}

_LEARNING: Mapping[str, Metric] = {
    "trainer/loss": Metric("1", "the loss of the optimizer batch, aggregated as configured"),
    "trainer/gradient_norm": Metric("1", "global gradient norm before clipping"),
    "trainer/learning_rate": Metric("1", "learning rate of this step"),
    "trainer/skipped_steps": Metric("steps", "updates left out because a gradient was not finite"),
    "trainer/step_seconds": Metric("seconds", "wall time from the last step's end to this one's"),
    "trainer/tokens_per_second": Metric(
        "tokens/s", "tokens packed into the batch over the time of train_step"
    ),
    "trainer/samples_per_second": Metric("rollouts/s", "rollouts trained on over wall time"),
    "trainer/busy_seconds": Metric("seconds", "time of train_step"),
    "trainer/flops_utilisation_share": Metric(
        "share", "model FLOPs of the batch over train_step time, of the measured peak"
    ),
    "trainer/idle_share": Metric("share", "time the trainer waited for anybody, of wall time"),
    "policy/entropy_nats": Metric("nats", "exact entropy of the policy, mean over loss tokens"),
    "policy/surprisal_nats": Metric("nats", "minus logprob of the sampled token, mean"),
    "policy/kl_to_behaviour_nats": Metric("nats", "KL(behaviour, current), k1 estimate, mean"),
    "policy/kl_to_behaviour_k3_nats": Metric("nats", "KL(behaviour, current), k3 estimate, mean"),
    "policy/kl_to_reference_nats": Metric("nats", "KL(current, reference), k1 estimate, mean"),
    "policy/kl_to_reference_k3_nats": Metric("nats", "KL(current, reference), k3 estimate, mean"),
    "policy/logprob_gap_at_lag_zero_nats": Metric(
        "nats", "|trainer - generator| logprob of tokens sampled by the weights in training"
    ),
    "importance/ratio_mean": Metric("1", "raw importance ratio, mean over loss tokens"),
    "importance/ratio_max": Metric("1", "raw importance ratio, maximum"),
    "importance/ess_raw_share": Metric("share", "effective sample size of the raw ratios"),
    "importance/ess_clamped_share": Metric("share", "effective sample size of the bounded ratios"),
    "importance/clip_share": Metric("share", "loss tokens at which the ratio's bound took hold"),
    "importance/clip_positive_share": Metric("share", "the same among tokens of advantage > 0"),
    "importance/clip_negative_share": Metric("share", "the same among tokens of advantage < 0"),
    "value/loss": Metric("1", "half the squared error of the value head, mean over loss tokens"),
    "value/explained_variance": Metric("1", "1 - Var(R - v) / Var(R) over loss tokens"),
    "value/clip_share": Metric("share", "loss tokens at which algorithm.value_clip took hold"),
    "value/learning_rate": Metric("1", "learning rate of a critic with weights of its own"),
    "value/gradient_norm": Metric("1", "gradient norm of a critic with weights of its own"),
    "value/mean": Metric("1", "value predicted before the updates, mean over loss tokens"),
    "advantage/std": Metric("1", "standard deviation of the advantages before whitening"),
    "kl_control/coefficient": Metric("1", "reward per nat of KL, in the reward of a token"),
    "kl_control/completion_nats": Metric(
        "nats", "KL(behaviour, reference) of a whole completion, mean: what adaptive control steers"
    ),
    "dpo/loss_nats": Metric("nats", "mean over pairs, before the update"),
    "dpo/margin_nats": Metric("nats", "implicit reward of the better minus the worse, mean"),
    "dpo/accuracy_share": Metric("share", "pairs whose better one has the larger implicit reward"),
    "dpo/pairs": Metric("pairs", "pairs in the batch: groups with two different rewards"),
    "lag/mean_steps": Metric("steps", "optimizer steps behind, mean over loss tokens"),
    "lag/max_steps": Metric("steps", "optimizer steps behind, maximum over loss tokens"),
    "lag/in_flight_mean_steps": Metric("steps", "lag that came while the completion was written"),
    "lag/in_queue_mean_steps": Metric("steps", "lag that came after its last token"),
    "lag/quarter_*_mean_steps": Metric("steps", "lag of the n-th quarter of a completion's tokens"),
    "lag/at_*_steps_share": Metric("share", "completion tokens of this lag: the histogram"),
    "lag/masked_tokens": Metric("tokens", "taken out of the loss by schedule.beyond_max_lag=mask"),
    "lag/zero_share": Metric("share", "loss tokens sampled by the very weights in training"),
}

_ROLLOUTS: Mapping[str, Metric] = {
    "reward/mean": Metric("1", "reward, mean over the rollouts that arrived"),
    "reward/std": Metric("1", "reward, standard deviation"),
    "reward/*_mean": Metric("1", "one component of the reward, or one task's, mean"),
    "completion/mean_tokens": Metric("tokens", "length of a completion, mean"),
    "completion/max_tokens": Metric("tokens", "length of a completion, maximum"),
    "completion/truncated_share": Metric("share", "completions cut by a limit"),
    "completion/mixed_version_share": Metric(
        "share", "completions written by more than one weight version"
    ),
    "group/zero_variance_share": Metric("share", "groups whose rewards are all equal"),
    "group/incomplete_groups": Metric("groups", "groups that lost a rollout"),
    "group/empty_groups": Metric("groups", "groups that lost every rollout"),
    "group/refused_groups": Metric(
        "groups", "turned away for others by algorithm.zero_variance=refill, since the last batch"
    ),
    "group/kept_unwillingly_groups": Metric(
        "groups", "kept though nothing is to be learned: algorithm.max_refill_share was reached"
    ),
    "batch/rollouts": Metric("rollouts", "sequences in the optimizer batch"),
    "batch/rows": Metric("rows", "packed rows that hold anything"),
    "batch/tokens": Metric("tokens", "prompt and completion tokens packed"),
    "batch/loss_tokens": Metric("tokens", "tokens that enter the loss"),
    "batch/fill_share": Metric("share", "tokens over the room in the rows used"),
    "drops/*_rollouts": Metric("rollouts", "rollouts not trained on, by reason"),
    "drops/completion_tokens": Metric("tokens", "completion tokens generated but not trained on"),
}

_RUN: Mapping[str, Metric] = {
    "generation/tokens_per_second": Metric(
        "tokens/s", "completion tokens decoded over the time generation was at work"
    ),
    "generation/flops_utilisation_share": Metric(
        "share", "model FLOPs of prefill and decode over time at work, of the measured peak"
    ),
    "generation/busy_slots_share": Metric("share", "slots that were decoding, mean over chunks"),
    "generation/idle_share": Metric(
        "share",
        "time generation waited for anybody, of wall time; part of the slots counts in part",
    ),
    "rollouts/out_groups": Metric("groups", "groups admitted and not yet in a batch"),
    "rollouts/queued_groups": Metric("groups", "finished groups that wait for the trainer"),
    "overcommit/delta_groups": Metric("groups", "Δ, admitted beyond the batch"),
    "overcommit/allowed_groups": Metric("groups", "Δ while the batch was collected"),
    "overcommit/reward_slope": Metric("1", "slope of the mean reward per step that moves Δ"),
    "overcommit/deferred_groups": Metric("groups", "in flight when the batch closed"),
    "overcommit/deferrals_mean_steps": Metric("steps", "a group of the batch was put off, mean"),
    "overcommit/deferrals_max_steps": Metric("steps", "a group of the batch was put off, maximum"),
    "overcommit/deferred_*_steps_groups": Metric(
        "groups", "histogram of deferrals since the start"
    ),
    "chunk_size/tokens": Metric("tokens", "most that a slot decoded between two looks, this step"),
    "chunk_size/chosen_tokens": Metric("tokens", "the candidate fastest in the last trials"),
    "chunk_size/*_seconds_per_token": Metric(
        "seconds/token",
        "a step with this candidate over its decoded tokens, median of this period",
    ),
    "publication/version": Metric("steps", "newest weight version that is complete"),
    "publication/inflight_updates": Metric("updates", "weight swaps with live slots, so far"),
    "publication/dispatch_seconds": Metric("seconds", "host time of the last publish"),
    "publication/transfer_seconds": Metric("seconds", "from dispatch to the complete copy"),
    "publication/swap_seconds": Metric("seconds", "host time of weight swaps since the last line"),
    "publication/superseded_versions": Metric("versions", "never travelled: newer ones overtook"),
    "waits/*_seconds": Metric("seconds", "who waited for whom, since the last line"),
    "rewards/*_completions": Metric(
        "completions", "scored, failed or late, so far, evaluations included"
    ),
    "scoring/streamed_tokens": Metric(
        "tokens", "read by the reward model while their completion was written, since the last line"
    ),
    "scoring/final_tokens": Metric("tokens", "read by it after their completion's end"),
    "scoring/busy_seconds": Metric("seconds", "time the reward model was at work"),
    "scoring/seconds_per_token": Metric("seconds/token", "busy_seconds over the tokens read"),
    "scoring/idle_share": Metric(
        "share", "time without a reward model at work on devices of its own, of wall time"
    ),
    "scoring/*_tokens": Metric("tokens", "the same of another model that reads along, by its name"),
    "scoring/*_busy_seconds": Metric("seconds", "the same of another model that reads along"),
    "scoring/*_seconds_per_token": Metric("seconds/token", "the same of another model"),
    "data/too_long_prompts": Metric("prompts", "prompts dropped for their length, so far"),
    "evaluation/accuracy_share": Metric("share", "evaluation prompts answered right, greedy"),
    "evaluation/mean_reward": Metric("1", "reward of an evaluation completion, mean, greedy"),
    "evaluation/truncated_share": Metric("share", "evaluation completions cut by a limit"),
    "evaluation/mean_tokens": Metric("tokens", "length of an evaluation completion, mean"),
    "run/samples": Metric("rollouts", "rollouts trained on, so far"),
    "run/train_seconds": Metric("seconds", "wall time since training began"),
    "host/memory_bytes": Metric("bytes", "resident memory of this process"),
    "host/compilations": Metric("programs", "compiled by XLA since this run began"),
}

# `*` in a name stands for a part that a run brings with it: a reward, a task, a reason.
METRICS: Mapping[str, Metric] = {**_LEARNING, **_ROLLOUTS, **_RUN, **_SPAN_METRICS}


@functools.lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The declaration that covers a name, exact ones first; None when there is none."""
    if name in METRICS and "*" not in name:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        if "*" in pattern and fnmatch.fnmatchcase(name, pattern):
            return metric
    return None


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError when a metric is not declared, naming each and the likeliest meant."""
    problems = []
    for name in names:
        if find_metric(name) is None:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"did you mean {near[0]}?" if near else "declare it in telemetry/schema.py"
            problems.append(f"metric {name} is not declared; {hint}")
    if problems:
        raise ValueError("\n".join(problems))
