"""Everything a run is made of, built from settings.

Owns construction: which part gets what. What the parts then do together is in `build.py`.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from pipeline_rl_jax.data.stream import build_evaluation_prompts, build_prompt_stream
from pipeline_rl_jax.data.tokenizer import Tokenizer, load_tokenizer
from pipeline_rl_jax.evaluation.greedy import GreedyEvaluator
from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.generation.stopping import StopRules
from pipeline_rl_jax.generation.transformer_engine import TransformerEngine
from pipeline_rl_jax.meshes import Meshes, build_meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.hf_config import read_config
from pipeline_rl_jax.models.partition import check_divisible, param_shardings
from pipeline_rl_jax.models.transformer import abstract_params
from pipeline_rl_jax.orchestrate.critic_model import CriticModel, find_critic
from pipeline_rl_jax.orchestrate.model_source import prepare_model
from pipeline_rl_jax.orchestrate.reference_model import ReferenceModel, find_reference
from pipeline_rl_jax.orchestrate.scoring_model import ScoringModel, find_scoring_model
from pipeline_rl_jax.preprocess.reference import ReferencePolicy
from pipeline_rl_jax.publication.device_channel import DeviceChannel
from pipeline_rl_jax.publication.weight_store import WeightStore
from pipeline_rl_jax.rewards.scorer import CompletionScorer, build_scorer
from pipeline_rl_jax.rollouts.ledger import PromptLedger
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.critic import Critic
from pipeline_rl_jax.trainer.optimizer import build_optimizer
from pipeline_rl_jax.trainer.state import TrainState
from pipeline_rl_jax.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Built before any weights are read: whatever is wrong with files or sizes shows here."""

    settings: Settings
    model_directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    meshes: Meshes
    optimizer: optax.GradientTransformation
    prompts: PromptLedger
    engine: TransformerEngine
    stop_rules: StopRules
    store: WeightStore
    scorer: CompletionScorer
    reference: ReferenceModel | None  # only when a coefficient asks for it
    critic: CriticModel | None  # only one with weights of its own
    reward_model: ScoringModel | None
    # Held while a program is dispatched to the trainer's devices, by whichever thread.
    order: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    # The same for devices beside the trainer's; one for all, for frozen models may share devices.
    order_beside: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def order_of(self, mesh: jax.sharding.Mesh) -> threading.Lock:
        """What to hold while a program is dispatched to a mesh other than generation's."""
        return self.order if mesh is self.meshes.trainer else self.order_beside

    def make_batcher(self, *, greedy: bool = False, emit_chunks: bool = False) -> ContinuousBatcher:
        """A batcher with a decode state of its own over the one engine."""
        generation = self.settings.generation
        if greedy:
            limit = self.settings.evaluation.max_new_tokens or generation.max_new_tokens
            generation = dataclasses.replace(generation, temperature=0.0, max_new_tokens=limit)
        return ContinuousBatcher(
            self.engine,
            generation,
            tokenizer=self.tokenizer,
            stop_rules=self.stop_rules,
            max_positions=self.config.max_positions,
            emit_chunks=emit_chunks,
        )

    def make_evaluator(self) -> GreedyEvaluator:
        """The evaluation set with training's engine and grader."""
        return GreedyEvaluator(
            build_evaluation_prompts(self.settings, self.tokenizer),
            make_batcher=lambda: self.make_batcher(greedy=True),
            scorer=self.scorer,
        )

    def load_reference(self) -> ReferencePolicy | None:
        """The reference policy with its weights read from their source, never from a checkpoint."""
        if self.reference is None:
            return None
        params = self.reference.load(self.settings, mesh=self.meshes.reference)
        return ReferencePolicy(
            self.reference.config,
            params,
            settings=self.settings,
            mesh=self.meshes.reference,
            order=self.order_of(self.meshes.reference),
            offloaded="reference" in self.settings.meshes.offloaded,
        )

    def make_trainer(self, state: TrainState) -> Trainer:
        """The trainer, and beside it the critic that is kept in its state."""
        meshes, critic = self.meshes, None
        if self.critic is not None:
            assert state.critic is not None
            critic = Critic(
                self.critic.config,
                self.settings,
                optimizer=self.critic.optimizer,
                mesh=meshes.critic,
                state=state.critic,
                # On the trainer's devices it works inside the trainer's steps, which hold `order`.
                order=None if meshes.critic is meshes.trainer else self.order_beside,
            )
        return Trainer(
            self.config,
            self.settings,
            optimizer=self.optimizer,
            mesh=meshes.trainer,
            state=dataclasses.replace(state, critic=None),
            critic=critic,
        )

    def make_channel(self) -> DeviceChannel:
        """The way of the weights: trainer layout on both ends, the engine's made on arrival."""
        settings, config = self.settings, self.config
        return DeviceChannel(
            self.store,
            source=_placed_params(config, settings.model.param_dtype, self.meshes.trainer),
            target=_placed_params(
                config, settings.generation.compute_dtype, self.meshes.generation
            ),
        )


def build_parts(settings: Settings) -> Parts:
    """Reads config, tokenizer and data. ValueError, in one line, for what cannot work."""
    directory = prepare_model(settings.model.source)
    config = read_config(directory)
    tokenizer_directory = Path(settings.model.tokenizer or directory).expanduser()
    tokenizer = load_tokenizer(tokenizer_directory)
    meshes = build_meshes(settings.meshes)
    check_fit(settings, config, meshes, tokenizer=tokenizer)
    reference = find_reference(settings, directory, policy=config, meshes=meshes)
    reward_model = find_scoring_model(settings, tokenizer_directory, policy=config, meshes=meshes)
    critic = find_critic(settings, directory, policy=config, meshes=meshes)
    prompts = PromptLedger(build_prompt_stream(settings, tokenizer))
    stop_rules = StopRules(
        tokenizer,
        stop_strings=settings.generation.stop_strings,
        ignore_eos=settings.generation.ignore_eos,
    )
    engine = TransformerEngine(
        config,
        settings.generation,
        mesh=meshes.generation,
        stop_token_ids=stop_rules.token_ids,
        seed=settings.seed,
    )
    convert = jax.jit(engine.convert_params, out_shardings=engine.param_shardings)
    return Parts(
        settings=settings,
        model_directory=directory,
        config=config,
        tokenizer=tokenizer,
        meshes=meshes,
        optimizer=build_optimizer(settings.trainer, num_steps=settings.num_updates),
        prompts=prompts,
        engine=engine,
        stop_rules=stop_rules,
        store=WeightStore(prepare=convert),
        scorer=build_scorer(settings.rewards, settings.generation),
        reference=reference,
        critic=critic,
        reward_model=reward_model,
    )


def check_fit(
    settings: Settings, config: ModelConfig, meshes: Meshes, *, tokenizer: Tokenizer
) -> None:
    """What settings and model demand of each other. ValueError naming the setting."""
    check_divisible(config, meshes.trainer, section="meshes.trainer")
    check_divisible(config, meshes.generation, section="meshes.generation")
    generation = settings.generation
    if generation.max_prompt_tokens >= config.max_positions:
        raise ValueError(
            f"generation.max_prompt_tokens ({generation.max_prompt_tokens}) leaves no room in the "
            f"model's context of {config.max_positions} tokens; use less than that"
        )
    if tokenizer.vocabulary_size > config.vocabulary_size:
        raise ValueError(
            f"model.tokenizer knows {tokenizer.vocabulary_size} tokens, the model "
            f"{config.vocabulary_size}; give the tokenizer that belongs to the model"
        )
    beyond = [i for i in tokenizer.eos_token_ids if i >= config.vocabulary_size]
    if beyond:
        raise ValueError(
            f"eos_token_id ({beyond[0]}) of model.tokenizer is beyond the model's "
            f"{config.vocabulary_size} tokens; mend its generation_config.json or config.json"
        )


def _placed_params(config: ModelConfig, dtype: str, mesh: jax.sharding.Mesh):
    """The parameter tree as shapes with dtype and sharding."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(dtype), sharding=sharding
        ),
        abstract_params(config),
        param_shardings(config, mesh),
    )
