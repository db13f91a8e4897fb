"""For training inside somebody's framework: each module needs that framework's package."""
