"""The profiler of speculation: prompts, passes counted while they run, and their figures."""
