"""A HuggingFace model or any module as blocks of graph: captured, proven, and made into functions of a rank."""
