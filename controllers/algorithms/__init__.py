"""What a training step computes: the presets of the policy losses, the critic, the reference, preferences and schedules."""
