"""What a lesson's classes promise, tested on the learner's own at its end."""
