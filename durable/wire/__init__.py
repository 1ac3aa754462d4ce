"""The messages of the Tinker API as bytes, in protobuf and in JSON; a leaf for both of its ends."""
