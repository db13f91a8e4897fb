"""Judge what a learner wrote, by what it does."""
