"""Tasks for real small models, which no document of the corpora contains."""
