"""What each route answers: chats, completions, messages, tokens, and the state of the server."""
