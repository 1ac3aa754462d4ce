"""llama.cpp as a peer of the engine, in an environment of its own (`make llama`)."""
