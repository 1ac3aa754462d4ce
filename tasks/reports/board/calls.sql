-- One row per answered call of a rollout's attempt, in the order in which they were asked, without
-- those of the roles that are told otherwise.
select
    role,
    seconds,
    prompt_tokens,
    sampled_tokens,
    left(asked, $letters) as asked,
    left(said, $letters) as said
from calls
where rollout_id = $rollout and attempt = $attempt and not list_contains($told::varchar[], role)
order by started, role, call
limit $most
