"""For training inside a framework: each module needs that framework's package."""
