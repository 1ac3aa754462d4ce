-- One row per rollout batch: when its first call began, and when its last rollout ended.
select
    batch,
    min(started) as began,
    max(ended) as ended

from spans
group by batch
having max(ended) is not null
order by batch
