"""Checks of a configuration: each value by its field, then the combinations of keys.

A check is a generator of problems, each a key and a predicate. The files are named after the
sections that they concern. Nothing here touches files.
"""

from collections.abc import Iterator
from itertools import chain

from evolver_async.config.checks.address_checks import buffer_address, no_sockets, weight_channel
from evolver_async.config.checks.agentevolver_checks import agent, guidance, mechanisms, reward
from evolver_async.config.checks.learner_checks import demonstrated, groups, learner, teacher
from evolver_async.config.checks.process_checks import (
    cluster,
    engine,
    gpus,
    policy,
    scaling,
    timeouts,
)
from evolver_async.config.checks.stage_checks import (
    eval_sets,
    limits,
    reward_models,
    served_tools,
    stages,
    tasks,
)
from evolver_async.config.effective.changes import effective
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import SUPERVISED
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import check_fields


def check(config: Config) -> None:
    """Raise ConfigError for the first value or combination that can work in no stage."""
    check_fields(config)
    _refuse(
        chain(
            *(gpus(config), cluster(config), scaling(config), no_sockets(config)),
            *(weight_channel(config), stages(config)),
        )
    )


def check_stage(config: Config, index: int) -> Config:
    """Return the configuration by which stage `index` runs, whose written one this is.

    Raise ConfigError for what cannot work. Keys that do nothing there can have any value that their
    field allows.
    """
    check_fields(config)
    config = effective(config, config.stages[index])
    _refuse(chain(policy(config), engine(config), tasks(config), eval_sets(config)))
    _refuse(chain(timeouts(config), buffer_address(config)))
    kind = config.stages[index].kind
    _refuse(chain(limits(config, index), learner(config), teacher(config)))
    _refuse(chain(reward(config), reward_models(config, index)))
    _refuse(chain(agent(config), mechanisms(config), served_tools(config)))
    if kind not in SUPERVISED:
        _refuse(guidance(config))
    if kind == "rl":
        _refuse(groups(config))
    else:
        _refuse(demonstrated(config, kind))
    return config


def _refuse(problems: Iterator[tuple[str, str]]) -> None:
    for key, problem in problems:
        raise ConfigError(f"{key}: {problem}")
