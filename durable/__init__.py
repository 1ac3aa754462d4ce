"""What lasts: files that outlive a crash, servers that outlive strangers, and short pauses."""
