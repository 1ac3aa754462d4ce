-- One row per rollout of sealed batches: its example, and its reward; null if the rollout failed.
with spans as (

    select * from named_parquet_rows($spans) where kind in ('reward', 'error')

)

select
    filename as batch,
    (attributes ->> '$.example_id')::bigint as example_id,
    played.reward

from spans
join rollout_attempts('spans') as played using (filename, rollout_id, attempt)
order by filename, rollout_id
