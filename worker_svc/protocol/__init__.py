"""The step stream: messages to values and back, sessions, and what a step must satisfy before it runs."""
