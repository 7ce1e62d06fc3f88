"""The commands of `icejax`, one file each, and the modules that they share."""

COMMANDS = {
    "generate": "answer prompts",
    "chat": "talk with a model",
    "serve": "answer over HTTP, as OpenAI's API does",
    "evaluate": "score a model and its cache on benchmarks",
    "convert": "turn a Hugging Face folder into an icejax folder, or back",
    "bench": "time prompts and answers on a model",
    "doctor": "tell what this machine can do",
    "sessions": "list, verify or remove saved conversations",
}
