"""The local page of ``meshwright ui``: a question as controls, its answer live, a search with progress.

``serve`` runs the server (starlette under uvicorn), which answers nothing itself: ``pool`` gives every request to a
worker process, whose tasks (``answer``, ``recipes``, ``searching``) read the question (``asked``), offer the values
that keep a plan legal (``controls``, ``repair``) and draw with the report's templates.
"""
