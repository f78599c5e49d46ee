"""What can be refused only with the run's tokenizer at hand: prompts that leave no room."""

from actors.chat import Chat
from actors.envs.base import make_env
from actors.episode import first_prompt
from actors.setting import setting_of
from evolver_async.buffer.granting import source_of
from evolver_async.buffer.tasks import Tasks
from evolver_async.config import Config
from evolver_async.config.check import ConfigError
from evolver_async.config.load import stage_config
from evolver_async.tokenizer import load_tokenizer


def check(config: Config) -> None:
    """ConfigError names `policy.max_length` where a stage's first task leaves no turn in it."""
    chat = Chat(load_tokenizer(config.policy.path))
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        queued = Tasks(config.run.seed, source_of(staged)).peek()
        assert queued is not None, "nothing is quarantined yet"
        env = make_env(staged.env.name, staged.env.params)
        try:
            observation = env.reset(queued.task, 0)
            prompt = first_prompt(setting_of(staged, chat, "", 0), env, observation)
            env.close()
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"env.name: {staged.env.name} cannot begin a task: {said}") from error
        needed = len(prompt) + staged.rollout.max_tokens
        if needed > config.policy.max_length:
            raise ConfigError(
                f"policy.max_length: {config.policy.max_length} is too short for a first prompt of"
                f" {len(prompt)} tokens and a turn of rollout.max_tokens: at least {needed}"
            )
