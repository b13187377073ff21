"""The search of `auto` while training goes on: a child process compiles and proves, real steps race."""
