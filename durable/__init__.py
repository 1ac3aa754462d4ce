"""What lasts: files that outlive a crash, and servers that outlive strangers."""
