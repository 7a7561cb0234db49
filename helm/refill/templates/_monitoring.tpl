{{/* How are pods scraped, and which rules does Prometheus get? */}}

{{/* ("serviceMonitor" or "podMonitor", its values): fields of an endpoint that were asked for. */}}
{{- define "refill.scraping" -}}
{{- $monitor := index . 1 -}}
{{- if and $monitor.interval $monitor.scrapeTimeout (gt (include "refill.milliseconds" $monitor.scrapeTimeout | int64) (include "refill.milliseconds" $monitor.interval | int64)) -}}
{{- fail (printf "%s.scrapeTimeout, %s, is longer than its interval, %s" (index . 0) $monitor.scrapeTimeout $monitor.interval) -}}
{{- end -}}
{{- $fields := dict -}}
{{- range $name := list "interval" "scrapeTimeout" "honorLabels" "metricRelabelings" -}}
{{- with get $monitor $name -}}
{{- $_ := set $fields $name . -}}
{{- end -}}
{{- end -}}
{{- if $fields -}}
{{ toYaml $fields }}
{{- end -}}
{{- end }}

{{- define "refill.milliseconds" -}}
{{ mul (regexFind "^[0-9]+" . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (regexFind "[a-z]+$" .)) }}
{{- end }}

{{/* (root, serviceMonitor or podMonitor). The job is one release's alone, which neither a Service's name is nor, with a namespace of the
monitor's own, what the operator makes of a PodMonitor. An instance is a pod by its name, that of its replacement, too. */}}
{{- define "refill.relabelings" -}}
{{- $own := list
    (dict "targetLabel" "job" "replacement" (include "refill.jobOfMonitor" (index . 0)))
    (dict "targetLabel" "instance" "sourceLabels" (list "__meta_kubernetes_pod_name"))
-}}
{{ concat $own ((index . 1).relabelings | default list) | toYaml }}
{{- end }}

{{- define "refill.jobOfMonitor" -}}
{{ .Release.Namespace }}/{{ include "refill.fullname" . }}
{{- end }}

{{/* Whose series the rules look at; nothing, which is every cache, where it is not the chart that says what they are scraped under. */}}
{{- define "refill.job" -}}
{{- $own := "" -}}
{{- range $monitor := list .Values.serviceMonitor .Values.podMonitor -}}
{{- if $monitor.enabled -}}
{{- $own = include "refill.jobOfMonitor" $ -}}
{{- range $monitor.relabelings -}}
{{- if eq (toString .targetLabel) "job" }}{{ $own = "" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ .Values.prometheusRule.job | default $own }}
{{- end }}

{{/* (expression, job): of that job's series alone. What is not of a pod or recorded of pods stays as it is. */}}
{{- define "refill.ofJob" -}}
{{- $series := `\b(?:\w+:refill_[\w:]+|(?:refill|process)_\w+|up)\b` -}}
{{- $named := regexReplaceAll $series (index . 0) (printf `${0}{job="%s"}` (index . 1)) -}}
{{ regexReplaceAll `"\}\s*\{` $named `", ` }}
{{- end }}

{{/* files/rules.yaml of this release's pods, with what prometheusRule.alerts says of single alerts, and with further rules. Every alert ends with the number
that it compares with. */}}
{{- define "refill.rules" -}}
{{- $rules := .Files.Get "files/rules.yaml" -}}
{{- if not $rules -}}
{{- fail "prometheusRule.enabled: this chart has no files/rules.yaml" -}}
{{- end -}}
{{- $given := .Values.prometheusRule -}}
{{- $alerts := $given.alerts | default dict -}}
{{- $job := include "refill.job" . -}}
{{- $names := list -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $rules).groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- $change := dict -}}
{{- if $rule.alert -}}
{{- $names = append $names $rule.alert -}}
{{- $change = get $alerts $rule.alert | default dict -}}
{{- end -}}
{{- if and $given.runbookUrl (dig "annotations" "runbook" "" $rule) -}}
{{- $link := replace "docs/RUNBOOK.md" $given.runbookUrl $rule.annotations.runbook -}}
{{- /* Tools show the second as a link. */ -}}
{{- $_ := merge (set $rule.annotations "runbook" $link) (dict "runbook_url" $link) -}}
{{- end -}}
{{- if hasKey $change "threshold" -}}
{{- $_ := set $rule "expr" (regexReplaceAll "[0-9.]+\\s*$" $rule.expr (include "refill.text" $change.threshold)) -}}
{{- end -}}
{{- with $change.for }}{{ $_ := set $rule "for" . }}{{ end -}}
{{- with $job -}}
{{- $_ := set $rule "expr" (include "refill.ofJob" (list $rule.expr .)) -}}
{{- if $rule.alert }}{{ $_ := set $rule "labels" (merge (dict "namespace" $.Release.Namespace) ($rule.labels | default dict)) }}{{ end -}}
{{- end -}}
{{- with $change.labels }}{{ $_ := set $rule "labels" (merge (deepCopy .) ($rule.labels | default dict)) }}{{ end -}}
{{- if ne (toString $change.enabled) "false" -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $groups = append $groups (set $group "rules" $kept) -}}
{{- end -}}
{{- end -}}
{{- range $name := keys $alerts | sortAlpha -}}
{{- if not (has $name $names) -}}
{{- fail (printf "prometheusRule.alerts: there is no alert %s; there are %s" $name (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- with $given.extraRules -}}
{{- $groups = append $groups (dict "name" "refill-extra" "rules" .) -}}
{{- end -}}
{{ dict "groups" $groups | toYaml }}
{{- end }}
