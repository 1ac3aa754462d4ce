-- One row per rollout batch that has ended: the minutes of the run until then, less the times in
-- which no process had it open, each from the last span before an opening to the opening.
with
batches as (
    select
        batch,
        min(started) as began,
        max(ended) as ended
    from spans
    group by batch
    having max(ended) is not null
),
away as (
    select
        opened,
        epoch(opened - (select max(ended) from spans where ended < opened)) as seconds
    from (select unnest($openings::timestamptz[]) as opened)
)
select
    batch,
    (
        epoch(ended - (select min(began) from batches))
        - coalesce((select sum(seconds) from away where opened < ended), 0)
    ) / 60 as minutes
from batches
