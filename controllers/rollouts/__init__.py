"""From problems to groups of completions with rewards and advantages."""
