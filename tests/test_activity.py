"""Who is remembered, and for how long."""

from buffer_world import World, config

from evolver_async.buffer.activity import WINDOW_S
from evolver_async.messages import Counters, Lease, Status


def test_who_has_no_part_in_the_run_is_forgotten_after_a_minute(tmp_path):
    world = World(tmp_path, config())
    world.resume()
    for number in range(100):
        world.one(f"watch-{number}", Status())
    world.lease(peer="actor-0")
    for generated in (5, 9):
        world.one("gone", Lease(credit=0, generated=generated))
    world.one("experience", Counters(values={"experience/entries": 3.0}))
    peers = world.service.activity.peers
    assert len(peers) == 104
    world.pass_time(WINDOW_S)
    assert len(peers) == 104
    world.one("watch-7", Status())
    world.pass_time(1.0)
    assert set(peers) == {"learner", "actor-0", "gone", "experience", "watch-7"}
    world.one("watch-0", Status())
    status = world.service.status(world.now)
    assert status["learner"].startswith("learner, last heard") and "actor-0" in status["actors"]
    assert status["ledger"]["generated_tokens"] == 4
    assert world.service.activity.counters() == {"experience/entries": 3.0}
