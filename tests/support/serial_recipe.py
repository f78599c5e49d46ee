"""A recipe that trains serially within seconds."""

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 8, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2}
advantage: {std: batch}
learner: {groups_per_step: 4, minibatches: 1, lr: 5.0e-3, decay: none}
stages:
  - kind: sft
    steps: 25
    expert_fraction: 0.0
    override: {rollout: {group_size: 1}, learner: {groups_per_step: 16, lr: 1.0e-2}}
  - kind: rl
    steps: 20
eval: {every: 10, episodes: 32, final_episodes: 64}
checkpoint: {every: 10}
launch: {kind: serial}
"""
