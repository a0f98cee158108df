"""Run one call in one worker process that then exits."""
