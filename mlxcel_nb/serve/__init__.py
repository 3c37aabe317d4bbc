"""An HTTP API, as OpenAI's clients speak it, over a running `Cluster`.

`ApiServer` listens on a thread and a loop of its own. What comes in is parsed by pure modules (`fields`, `requests`,
`messages`), answered through `Cluster.stream`, and goes out as `answers` shapes it. Callers are not trusted: `guard`
lets them in.
"""
