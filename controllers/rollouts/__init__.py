"""From problems to groups of completions with rewards and advantages: chat templates, episodes, the queue, evaluation."""
