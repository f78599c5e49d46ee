"""How Hypothesis draws: the same examples every time, however slow the machine, so that a red run
speaks of the change it ran on.

make test ARGS=--hypothesis-profile=random    draws anew
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "random", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")
