"""From a run's data set to the batches of each process, and to the views that the model sees.

In come the section `data` (`options`) and a folder or URL of shards, or tars without an index.
`run_data` opens them: rows get roles (`protocol`), a plan says which rows make up batch t (`plan`),
a reader fetches and decodes them (`reader`), loader workers fill buffers (`batches`). Out come a
`Batch` of stored views, labels and random keys, and, from `views`, the augmented tensors.
"""
