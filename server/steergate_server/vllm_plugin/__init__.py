"""The one room that imports vLLM: worker, runner, scheduler, HTTP front and server command."""
