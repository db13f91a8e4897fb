"""What each part's module begins with: the imports and the class shells that its lesson gives."""
