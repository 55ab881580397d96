"""`python -m shardwise` is the command `shardwise`."""

from shardwise.cli import main

main()
