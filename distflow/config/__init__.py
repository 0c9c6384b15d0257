"""What a recipe may say: the schema, how files and overrides are composed, and errors that name file and line."""
