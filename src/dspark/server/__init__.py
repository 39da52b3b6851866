"""The server: the engine behind OpenAI's HTTP interface, and a page where speculation is seen.

    app.py          routes; who may ask what (`create_app`)
    guard.py        what is settled before any route runs: size, pace, key, request id
    protocol.py     what may be asked, strictly; sampling.py turns it into the engine's words
    service.py      one engine shared by many: admission, pieces, usage, time
    choice.py       one answer on its way out: text, log-probabilities and ids that agree
    completions.py, chat.py, tools.py   answers in OpenAI's shapes, streamed or whole
    metrics.py      vLLM's names for Prometheus, ATOM's for /debug/mtp_stats
    playground.py   the page at /
    run.py          uvicorn around it, draining when it is told to stop

An answer that is not streamed is the streamed one, collected: the two cannot differ.
"""
